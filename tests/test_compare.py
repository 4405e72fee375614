"""Back ends side by side: two real ones on a CPU through the command, then the table and the differences out of MLflow."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from mlflow.tracking import MlflowClient

import checks
from conftest import ENVIRONMENT, ROOT
from stopping import Stop, Stopped

EXPERIMENT = "p7-grpo-backends"


def compare(*arguments, store, cwd, timeout=400) -> SimpleNamespace:
    """compare.py as a user runs it, without a GPU."""
    env = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", "MLFLOW_TRACKING_URI": store}
    done = subprocess.run([sys.executable, str(ROOT / "compare.py"), *map(str, arguments)], cwd=cwd, env=env,
                          capture_output=True, text=True, timeout=timeout)  # fmt: skip
    return SimpleNamespace(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def here(*arguments, both, capsys) -> SimpleNamespace:
    """The same in this process, which spares 7 seconds of imports."""
    import compare as script

    code, message = 0, ""
    environment = {"CUDA_VISIBLE_DEVICES": "", "MLFLOW_TRACKING_URI": both.store}
    with contextlib.chdir(both.folder), mock.patch.dict(os.environ, environment):
        try:
            script.main([str(argument) for argument in arguments])
        except checks.Refused as refusal:
            code, message = 2, str(refusal)
        except SystemExit as stop:
            code = stop.code
    return SimpleNamespace(code=code, stdout=capsys.readouterr().out, message=message)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Two steps of trl and of paged on SmolLM2's weights, and vllm, which cannot run here."""
    folder = tmp_path_factory.mktemp("compare")
    store = f"sqlite:///{folder / 'mlflow.db'}"
    done = compare("run", "--backends", "trl", "vllm", "paged --no-use-cuda-graph", "--steps", 2, "--", "--preset", "smollm2",
                   "--beta", 0.05, "--num-generations", 2, "--max-completion-length", 8, store=store, cwd=folder)  # fmt: skip
    assert done.code == 0, done.stdout + done.stderr
    parent = re.search(r"parent run (\w+);", done.stdout)[1]
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    runs = client.search_runs([experiment.experiment_id], f"tags.mlflow.parentRunId = '{parent}'")
    return SimpleNamespace(done=done, store=store, folder=folder, parent=parent, client=client,
                           runs={run.data.tags["backend"].split()[0]: run for run in runs})  # fmt: skip


def test_each_back_end_is_a_run_under_one_parent(both):
    assert both.runs.keys() == {"trl", "paged", "vllm"}
    assert [both.runs[name].info.status for name in ("trl", "paged", "vllm")] == ["FINISHED", "FINISHED", "FAILED"]
    assert "which needs a CUDA GPU" in both.runs["vllm"].data.tags["error"]
    assert both.client.get_run(both.parent).info.status == "FINISHED"
    assert {file.path for file in both.client.list_artifacts(both.parent)} == {"table.md", "backends.png"}
    params = {name: both.runs[name].data.params for name in ("trl", "paged")}
    different = {key for key in params["trl"] if params["trl"][key] != params["paged"].get(key)}
    assert different <= {"backend", "run_name", "output_dir"}, different
    assert params["trl"]["per_device_train_batch_size"] == "2" and params["trl"]["steps_per_generation"] == "None"


def test_the_same_quantities_are_logged(both):
    """With one seed, both draw the same problems; before the first update the KL is 0, and a norm is one before clipping."""
    for name in ("trl", "paged"):
        metrics = both.runs[name].data.metrics
        history = {key: [m.value for m in both.client.get_metric_history(both.runs[name].info.run_id, key)]
                   for key in ("kl", "grad_norm", "loss", "reward", "completions/mean_length",
                               "completions/compression_ratio")}  # fmt: skip
        assert all(len(values) == 2 for values in history.values()), history
        assert abs(history["kl"][0]) < 1e-5 and 1 <= metrics["completions/mean_length"] <= 8
        assert metrics["seconds/generation"] > 0 and metrics["seconds/forward_backward"] > 0
        assert both.runs[name].data.metrics["rss_peak_gib"] > 0.5


def test_the_table_is_read_back_from_the_store(both, capsys):
    again = compare("table", both.parent, store=both.store, cwd=both.folder)
    assert again.code == 0 and again.stdout.strip() in both.done.stdout
    lines = again.stdout.splitlines()
    assert lines[0].startswith("| back end | run | steps | training, s | median step, s (from step 1) | p90, s | of it ")
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| trl", "| vllm", "| paged --no-use-cuda-graph"]
    one = here("table", both.parent, "--steps", 1, both=both, capsys=capsys)
    assert one.code == 0 and [line.split(" | ")[2] for line in one.stdout.splitlines()[2:]] == ["1", "0", "1"]
    more = here("table", both.parent, "--steps", 30, both=both, capsys=capsys)
    assert (more.code, more.message) == (2, "--steps 30: the longest of these runs has 2")


def test_a_run_against_itself_is_all_zeros(both, capsys):
    run_id = both.runs["trl"].info.run_id
    done = here("diff", run_id, run_id, both=both, capsys=capsys)
    assert done.code == 0 and done.stdout.splitlines()[-1] == "within the bands over 2 steps"
    for line in done.stdout.splitlines()[2:7]:
        assert line.endswith("| 0 | 0 |"), line


def test_a_band_that_is_left_is_exit_code_1(both, capsys):
    ids = [both.runs[name].info.run_id for name in ("trl", "paged")]
    inside = here("diff", *ids, "--kl-max", 5, "--length-ratio", 10, both=both, capsys=capsys)
    assert inside.code == 0 and "| KL | " in inside.stdout and "not logged" not in inside.stdout
    outside = here("diff", *ids, "--loss-min", -3, "--loss-max", -1, both=both, capsys=capsys)
    assert outside.code == 1 and "loss of trl is " in outside.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["table", "nosuchrun"], "parent nosuchrun: no run in experiment p7-grpo-backends is under it"),
        (["diff", "nosuchrun", "another"], "run nosuchrun: the store has none of that id"),
        (["run", "--steps", "0"], "--steps 0: must be at least 1"),
        (["run", "--backends", "trl", "sglang"], "--backends 'sglang': there are vllm, unsloth, paged, trl"),
        (["run", "--backends", ""], "--backends '': there are vllm"),
        (["run", "--backends", "trl", "trl"], "--backends: 'trl' is there twice; --noise"),
        (["run", "--backends", "trl paged"], "'paged' is no flag; without quotes each is a back end: trl paged"),
        (["run", "--backends", "trl --bogus"], "--backends 'trl --bogus': train.py has no flag --bogus"),
        (["run", "--backends", "trl --processes 2"], "--backends 'trl --processes 2': train.py has no flag --processes"),
        (["run", "--backends", "trl -h"], "--backends 'trl -h': train.py has no flag -h"),
        (["run", "--", "--steps", "4"], "--steps: it is compare's own, and goes before the --"),
        (["run", "--", "--help"], "--help: before the -- it is compare's"),
        (["run", "--steps", "100000000"], "--steps 100000000: must be at least 1, and at most 1000000"),
        (["run", "--backends", "vllm", "--", "--preset", "smollm2"], "vllm: --preset smollm2 generates with vLLM"),
        (["run", "--backends", "trl", "--", "--preset", "smollm2", "--task", "/nowhere"], "trl: --task /nowhere: "),
        (["run", "--backends", "trl --beta 0.1"], "--beta would make it another training; after -- it is for all of them"),
        (["run", "--backends", "trl --use-cuda-graph"], "trl --use-cuda-graph: --use-cuda-graph: it is about --backend paged"),
        (["run", "--backends", "trl --save_steps 1"], "--save_steps would make it another training"),
        (["run", "--backends", "trl 'x"], ": no closing quotation; for example 'trl --torch-compile'"),
        (["run", "--backends", "trl", "--steps", "x"], "argument --steps: invalid int value: 'x'; compare.py run --help"),
        (["diff", "one"], "the following arguments are required: candidate; compare.py diff --help"),
        (["table", "a'b"], "is no id of a run, which has letters and digits alone"),
        (["diff", "", "b"], "'' is no id of a run"),
        (["diff", "a", "b", "--compression-ratio", "0"], "--compression-ratio 0: must be above 1"),
        (["diff", "a", "b", "--length-ratio", "nan"], "--length-ratio nan: must be above 1"),
        (["diff", "a", "b", "--kl-max", "nan"], "--kl-max nan: must be 0 or more"),
        (["diff", "a", "b", "--loss-min", "2"], "--loss-min 2 --loss-max 1: the first must be below the second"),
        (["run", "--backends", "trl", "--", "--max-steps", "3"], "--max-steps: compare sets it itself"),
        (["run", "--backends", "trl", "--", "--num-generations", "4", "--per-device-train-batch-size", "3"],
         "nearest batch sizes: 4"),
        (["run", "--backends", "trl", "--", "--learning-rate", "-1"], "--learning-rate -1.0: must be 0 or a positive number"),
        (["table", "x", "--preset", "smollm2"], "table --preset: table --help lists what it takes"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_at_once(arguments, words, both, capsys):
    done = here(*arguments, both=both, capsys=capsys)
    assert done.code == 2 and words in done.message and len(done.message.splitlines()) <= 2, done.message


def test_a_parent_is_no_run_and_a_run_no_parent(both, capsys):
    run_id = both.runs["trl"].info.run_id
    done = here("diff", both.parent, run_id, both=both, capsys=capsys)
    assert done.code == 2 and f"run {both.parent} is none of a back end; compare.py table {both.parent}" in done.message
    done = here("table", run_id, both=both, capsys=capsys)
    assert done.code == 2 and f"it is under {both.parent} itself" in done.message


def test_a_store_that_is_only_read_is_not_made(both, capsys):
    nowhere = SimpleNamespace(store=f"sqlite:///{both.folder / 'nowhere.db'}", folder=both.folder)
    done = here("table", both.parent, both=nowhere, capsys=capsys)
    assert done.code == 2 and "nowhere.db is not there, so it has no runs" in done.message
    assert not (both.folder / "nowhere.db").exists()


def test_a_second_signal_is_passed_on_and_a_third_kills():
    """To the parent alone, a second apart, with a child that hangs: none is left behind."""
    code = "import signal; [signal.signal(n, lambda *_: print('heard', flush=True)) for n in (15,)]; print('up', flush=True); "
    code += "exec('while True: signal.pause()')"
    parent = textwrap.dedent(f"""
        import subprocess, sys
        import compare
        from stopping import Stop, Stopped
        with Stop():
            child = subprocess.Popen([sys.executable, "-c", {code!r}])
            print("started", child.pid, flush=True)
            try:
                child.wait()
            except Stopped as stopped:
                compare.end(child, stopped.signum)
            print("ended by", -child.returncode, flush=True)
    """)
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = iter(process.stdout.readline, "")
        assert {next(lines).split()[0], next(lines).split()[0]} == {"started", "up"}
        for expected in ("heard", "heard", "ended by 9"):
            process.send_signal(signal.SIGTERM)
            assert next(lines).strip() == expected
            time.sleep(1.1)
    assert process.returncode == 0


FAKE = """
import fcntl, json, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--output-dir") + 1]) / "run"
folder.mkdir(parents=True)
journal = open(folder / "record.jsonl", "a", buffering=1)
fcntl.flock(journal, fcntl.LOCK_EX)
def put(item): journal.write(json.dumps(item) + chr(10))
put({"run_id": os.environ["RUN"], "run_name": "trl", "experiment": "p7-grpo-backends"})
put({"n": 0, "kind": "metrics", "time": 2, "step": 1, "values": {"seconds/generation": 1.0, "loss": 0.1}})
end = os.environ["END"]
if end == "3": put({"n": 1, "kind": "status", "status": "FINISHED", "time": 3})
if end == "hangs": signal.signal(signal.SIGTERM, lambda *_: None)
while end == "hangs": time.sleep(1)
time.sleep(0.5)
os.kill(os.getpid(), 9) if end == "killed" else os._exit(int(end))
"""


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [("killed", "KILLED", "ended by SIGKILL"), ("1", "KILLED", "exit code 1"), ("3", "FINISHED", None),
     ("hangs", "KILLED", "ended by SIGKILL")],
)  # fmt: skip
def test_what_a_process_leaves_is_sent_and_said(end, status, error, both, tmp_path, monkeypatch):
    """A train.py that is killed, that could not reach its store (1, and 3 once trained), or that hears no signal."""
    import compare as script
    import train as lab

    (tmp_path / "train.py").write_text(FAKE)
    monkeypatch.setattr(lab, "PROJECT", tmp_path)
    monkeypatch.setattr(script, "look_at", lambda *_: None)
    parent, run = (both.client.create_run(both.client.get_experiment_by_name(EXPERIMENT).experiment_id) for _ in range(2))
    for name, value in {"RUN": run.info.run_id, "END": end, "MLFLOW_TRACKING_URI": both.store}.items():
        monkeypatch.setenv(name, value)

    def press():
        for _ in range(3):
            time.sleep(1.2)
            os.kill(os.getpid(), signal.SIGTERM)

    found, presses = None, threading.Thread(target=press)
    with Stop():
        if end == "hangs":
            presses.start()
        try:
            found = script.start("trl", ["--output-dir", str(tmp_path / "out")], None, None, parent.info.run_id, both.client,
                                 tmp_path / "out")  # fmt: skip
        except Stopped:
            presses.join()
    run = both.client.get_run(run.info.run_id)
    assert (run.info.status, run.data.tags.get("error"), run.data.metrics["loss"]) == (status, error, 0.1)
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert found == (None if end == "hangs" else (run.info.run_id, error))


def test_two_runs_without_anything_to_compare_are_refused(made_up, both, capsys):
    done = here("diff", made_up.runs[1], made_up.runs[1], "--anyway", both=both, capsys=capsys)
    assert done.code == 2 and "the runs have 0 steps in common" in done.message
    both.client.log_metric(made_up.runs[1], "seconds/generation", 1.0, step=1)
    done = here("diff", made_up.runs[1], made_up.runs[1], "--anyway", both=both, capsys=capsys)
    assert done.code == 2 and "nothing to compare: in these steps one of them logged none of loss, reward, KL" in done.message


def test_runs_that_differ_are_refused_unless_asked_for(both, capsys):
    trl, vllm = both.runs["trl"].info.run_id, both.runs["vllm"].info.run_id
    done = here("diff", trl, vllm, both=both, capsys=capsys)
    assert done.code == 2 and f"not comparable: vllm ({vllm}) is FAILED" in done.message
    anyway = here("diff", trl, vllm, "--anyway", both=both, capsys=capsys)
    assert anyway.code == 2 and "the runs have 0 steps in common" in anyway.message


@pytest.fixture
def made_up(both, capsys):
    """A parent with two runs that MLflow was told of: one of rollouts of two steps, and one that logged nothing."""
    experiment = both.client.get_experiment_by_name(EXPERIMENT)
    parent = both.client.create_run(experiment.experiment_id).info.run_id
    runs = []
    for backend in ("vllm", "unsloth"):
        run = both.client.create_run(experiment.experiment_id)
        runs.append(run.info.run_id)
        both.client.set_tag(runs[-1], "mlflow.parentRunId", parent)
        both.client.set_tag(runs[-1], "backend", backend)
    for name, value in {"backend": "vllm", "effective_batch": 4, "steps_per_rollout": 2}.items():
        both.client.log_param(runs[0], name, value)
    for step in range(1, 7):  # generation at every other step
        rollout = {"seconds/generation": 3.0, "completions/mean_length": 100.0, "reward": 0.1 * step}
        rollout = rollout if step % 2 else {"seconds/generation": 0.0}
        for name, value in {"seconds/forward_backward": 0.5, **rollout}.items():
            both.client.log_metric(runs[0], name, value, step=step)
    both.client.set_tag(runs[1], "error", "OutOfMemoryError: no room")
    return SimpleNamespace(parent=parent, runs=runs)


def test_a_rollout_of_two_steps_counts_as_a_whole(made_up, both, capsys):
    """3 s of generation for two steps of 0.5 s and 4 answers of 100 tokens: 2 s a step, 1.5 of them generating."""
    done = here("table", made_up.parent, both=both, capsys=capsys)
    first, second = (line.split(" | ") for line in done.stdout.splitlines()[2:])
    assert first[2:] == ["6", "12", "2", "100 %", "2", "1.5", "100", "200", "", "", "0.5", "RUNNING |"]  # the fifth's reward
    assert second[0] == "| unsloth" and second[-1] == "OutOfMemoryError: no room |"


def test_back_ends_that_logged_nothing_are_rows_all_the_same(made_up, both, capsys):
    both.client.delete_run(made_up.runs[0])
    both.client.set_tag(made_up.runs[1], "backend", "vllm")
    done = here("table", made_up.parent, both=both, capsys=capsys)
    assert done.code == 0
    assert done.stdout.splitlines()[2] == f"| vllm | {made_up.runs[1]} | 0 | OutOfMemoryError: no room |"


@pytest.mark.parametrize(("ratio", "said"), [(0.9, None), (1.3, None), (3.0, "3.00 to 1"), (0.5, "0.50 to 1")])
def test_answers_that_say_nothing_are_outside_of_the_bands(ratio, said):
    """A loop compresses better than the reference's answers, noise worse; lengths are the same."""
    import compare as script

    def run(name, ratio):
        steps = {step: {"completions/mean_length": 20.0, "completions/compression_ratio": ratio} for step in range(1, 4)}
        return script.Run(name, None, name, "FINISHED", {}, {}, None, steps)

    options = SimpleNamespace(kl_max=0.015, loss_min=-0.3, loss_max=1.0, length_ratio=1.5, compression_ratio=1.5)
    left = script.bands_left(run("trl", 1.0), run("paged", ratio), [1, 2, 3], options)
    assert len(left) == (said is not None) and (not said or f"answers of paged compress {said}" in left[0])


def test_what_cannot_run_is_a_row_and_a_used_folder_is_refused(both, capsys):
    """8 bits are vLLM's alone, so all three are refused at once; with one that can, the others are rows."""
    done = here("run", "--backends", "trl", "paged", "--", "--load-in", "fp8", both=both, capsys=capsys)
    assert done.code == 2 and "trl: --load-in fp8: vLLM makes these weights" in done.message
    used = next((both.folder / "benchmarks").iterdir())
    done = here("run", "--backends", "trl", "--out", used, "--", "--preset", "smollm2", both=both, capsys=capsys)
    assert done.code == 2 and f"--out {used}: holds the runs of an earlier comparison" in done.message
    (both.folder / "file").touch()
    done = here(
        "run", "--backends", "trl", "--out", both.folder / "file", "--", "--preset", "smollm2", both=both, capsys=capsys
    )
    assert done.code == 2 and f"--out {both.folder / 'file'}: " in done.message


def test_the_later_steps_of_a_rollout_are_looked_at_too():
    """A rollout of 8 steps logs its answers in the first: the last third of 8 steps has none of its own."""
    import compare as script

    def run(name, length):
        steps = {step: {"completions/mean_length": length} if step == 1 else {} for step in range(1, 9)}
        return script.Run(name, None, name, "FINISHED", {}, {}, None, steps)

    options = SimpleNamespace(kl_max=0.015, loss_min=-0.3, loss_max=1.0, length_ratio=1.5, compression_ratio=1.5)
    left = script.bands_left(run("trl", 20.0), run("paged", 200.0), list(range(1, 9)), options)
    assert left == ["answers of paged have 200 tokens in the last 2 steps, trl's 20"]


@pytest.mark.parametrize("loss", [float("nan"), 1.7976931348623157e308, -1.7976931348623157e308])
def test_a_number_that_is_none_is_outside_also_as_mlflow_keeps_it(loss):
    import compare as script

    def run(name, loss):
        return script.Run(name, None, name, "FINISHED", {}, {}, None, {1: {"loss": 0.0}, 2: {"loss": loss}})

    one, other = run("trl", 0.0), run("paged", loss)
    options = SimpleNamespace(kl_max=0.015, loss_min=-0.3, loss_max=1.0, length_ratio=1.5, compression_ratio=1.5)
    assert "loss of paged is no number in step 2" in script.bands_left(one, other, [1, 2], options)
    assert script.apart(one, other, "loss", [1, 2]) == script.apart(other, other, "loss", [1, 2]) == ["nan", "nan"]
