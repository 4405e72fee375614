"""Interrupts, crashes, dead servers, full disks, and going on afterwards: what is left each time, and what is said.

Faults are real: signals, a killed `mlflow server`, a full file system, a kill -9. Most runs are calls of train.main in this
process, on a random two-layer model with SmolLM2's tokenizer: 3 seconds each, and each a proof that the call before it left
nothing behind. Whatever ends the process, or hangs on its terminal, runs the script itself.
"""

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import train  # isort: skip

os.environ.update({**train.ENVIRONMENT, **os.environ})  # before unsloth reads it
import unsloth  # noqa: E402, F401  # isort: skip
import mlflow
import torch
from safetensors.torch import load_file, save_file

import adapter
import checkpoints
import pictures
from checks import Refused
from conftest import ROOT, Server
from conftest import train as run_script
from record import upload

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="exact on a CPU: CUDA_VISIBLE_DEVICES= uv run pytest")
TASK = Path(__file__).with_name("faulty_task.py")
STEPS = 8  # with 6 problems of which a step takes one: training goes into the second epoch


@pytest.fixture(scope="module", autouse=True)
def ctrl_c_is_heard():
    """Also where the tests run as a job in the background, for which a shell has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def command_line(tiny, *arguments):
    if "--resume-from-checkpoint" in arguments:  # that has the config
        return [*arguments]
    return ["--model", tiny, "--task", TASK, "--max-steps", STEPS, "--train-problems", 6, "--num-generations", 4,
            "--per-device-train-batch-size", 4, "--max-completion-length", 8, "--eval-problems", 4,
            "--learning-rate", 1e-2, "--lr-scheduler-type", "linear", "--warmup-steps", 0, *arguments]  # fmt: skip


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """MLflow's database with nothing in it. All its migrations take half of the time of a run of 8 steps."""
    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="module")
def lab(tiny, empty_store):
    """Call train.main in a folder: returns its exit code (2 for Refused), what it showed, its run's folder and its record."""

    def lab(folder, *arguments, **environment):
        folder.mkdir(exist_ok=True)
        before = set(folder.glob("outputs/*/"))
        store = folder / "mlflow.db"
        if not (store.exists() or "MLFLOW_TRACKING_URI" in environment or "--resume-from-checkpoint" in arguments):
            shutil.copyfile(empty_store, store)  # not where a checkpoint may be refused, which must leave none
        environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{store}", **environment}
        file, kept, code, refused, start = open(folder / "screen", "w+"), os.dup(1), 0, "", time.perf_counter()
        os.dup2(file.fileno(), 1)
        try:
            with mock.patch.dict(os.environ, environment), contextlib.chdir(folder):
                train.main(list(map(str, command_line(tiny, *arguments))))
        except SystemExit as end:
            code = end.code
        except Refused as refusal:
            code, refused = 2, str(refusal)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        seconds = time.perf_counter() - start
        run_dir = next(iter(set(folder.glob("outputs/*/")) - before), None)
        return SimpleNamespace(code=code, said=(folder / "screen").read_text(), refused=refused, run_dir=run_dir,
                               store=environment["MLFLOW_TRACKING_URI"], seconds=seconds)  # fmt: skip

    return lab


class Recorded:
    """What the store has of the run with that folder."""

    def __init__(self, store, run_dir, experiment="p7-grpo"):
        self.client = mlflow.MlflowClient(store)
        found = self.client.search_runs([self.client.get_experiment_by_name(experiment).experiment_id])
        (run,) = [run for run in found if run.data.tags.get("run_dir") == str(Path(run_dir).resolve())]
        self.id, self.status, self.tags, self.params = run.info.run_id, run.info.status, run.data.tags, run.data.params
        self.metrics = run.data.metrics

    def history(self, name):
        return {metric.step: metric.value for metric in self.client.get_metric_history(self.id, name)}

    def artifacts(self, path=None):
        return {file.path for file in self.client.list_artifacts(self.id, path)}

    def read(self, name, tmp_path):
        return Path(self.client.download_artifacts(self.id, name, tmp_path)).read_text()


def recorded(run):
    return Recorded(run.store, run.run_dir)


def weights(folder):
    return load_file(folder / "adapter_model.safetensors")


def same(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def unbroken(lab, tmp_path_factory):
    run = lab(tmp_path_factory.mktemp("unbroken"), "--save-steps", 4, "--eval-steps", 4)
    assert run.code == 0, run.said
    return run


@pytest.fixture(scope="module")
def stopped(lab, tmp_path_factory):
    """The same run, told to stop in its fifth step, before its regular checkpoint."""
    return lab(tmp_path_factory.mktemp("stopped"), "--save-steps", 50, "--eval-steps", 4, AT="5", DO="SIGTERM")


# signals


def test_sigterm_ends_the_step_and_leaves_checkpoint_adapter_and_the_way_to_go_on(stopped):
    folder = stopped.run_dir / "checkpoints" / "checkpoint-5"
    assert stopped.code == 143
    assert "SIGTERM: stopping once this step is done; once more stops at once\n" in stopped.said
    assert "step 5/8" in stopped.said and "step 6/8" not in stopped.said
    assert f"train.py --resume-from-checkpoint outputs/{stopped.run_dir.name}/checkpoints/checkpoint-5\n" in stopped.said
    assert same(folder, stopped.run_dir / "final-adapter")
    assert f"adapter: {stopped.run_dir / 'final-adapter'} (largest entry of B 0." in stopped.said
    run = recorded(stopped)
    assert run.status == "KILLED" and set(run.history("loss")) == {1, 2, 3, 4, 5}
    assert "lora/adapter_model.safetensors" in run.artifacts("lora") and "reward_curve.png" in run.artifacts()


def test_the_second_signal_stops_at_once(lab, tmp_path):
    run = lab(tmp_path, "--save-steps", 2, AT="5", DO="SIGINT SIGINT")
    assert run.code == 130 and "step 5/8" not in run.said and not (run.run_dir / "final-adapter").exists()
    assert f"--resume-from-checkpoint outputs/{run.run_dir.name}/checkpoints/checkpoint-4\n" in run.said
    assert recorded(run).status == "KILLED"


def test_one_stop_that_arrives_twice_is_one(lab, tmp_path):
    """As `timeout` sends it to the script and to uv, which passes it on."""
    run = lab(tmp_path, AT="3", DO="SIGTERM+SIGTERM")
    assert run.code == 143 and "step 3/8" in run.said and (run.run_dir / "final-adapter").is_dir()


def test_a_signal_that_was_ignored_stays_ignored(lab, tmp_path):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = lab(tmp_path, "--max-steps", 1, AT="1", DO="SIGHUP")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.code == 0 and "stopping" not in run.said


def test_a_signal_while_loading_stops_there_though_the_loader_swallows_it(lab, tmp_path):
    """Unsloth's loader has bare `except:` on its way."""
    load = unsloth.FastLanguageModel.from_pretrained

    def swallow(**arguments):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        except:  # noqa: E722
            pass
        return load(**arguments)

    with mock.patch.object(unsloth.FastLanguageModel, "from_pretrained", swallow):
        run = lab(tmp_path)
    assert run.code == 143 and "no checkpoint is there: the same command starts anew" in run.said
    assert "held-out" not in run.said and recorded(run).status == "KILLED"


def test_ctrl_c_in_a_terminal_through_uv(tiny, tmp_path):
    """The terminal sends Ctrl-C to uv and to the script: once is once."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not on the PATH")
    arguments = [*command_line(tiny, "--max-steps", 1000), "--eval-problems", 0, "--output-dir", tmp_path / "outputs"]
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(uv, [uv, "run", "--no-sync", "python", "train.py", *map(str, arguments)], env)
    said, sent = b"", False
    with contextlib.suppress(OSError):  # the terminal is gone with the script
        while data := os.read(terminal, 4096):
            said += data
            if b"step    3/1000" in said and not sent:
                sent = os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    said = said.decode().replace("\r\n", "\n")
    assert os.waitstatus_to_exitcode(status) == 130, said
    assert "Ctrl-C: stopping once this step is done" in said and "go on with: uv run python " in said
    (run_dir,) = (tmp_path / "outputs").iterdir()
    assert checkpoints.last(run_dir) and (run_dir / "final-adapter").is_dir() and "Traceback" not in said


# going on


def resume(lab, stopped, *arguments, **environment):
    return lab(stopped.run_dir.parent.parent, *arguments, "--resume-from-checkpoint", "last", **environment)


@pytest.fixture(scope="module")
def resumed(lab, stopped):
    return resume(lab, stopped)


def test_a_resumed_run_is_the_unbroken_one(unbroken, stopped, resumed):
    """Weights to the bit, losses, rewards, schedule, held-out points; with them, that one seed gives one run."""
    assert resumed.code == 0, resumed.said
    assert same(unbroken.run_dir / "final-adapter", resumed.run_dir / "final-adapter")
    whole, first, second = map(recorded, (unbroken, stopped, resumed))
    for name in ("loss", "grad_norm", "learning_rate", "reward", "completions/mean_length", "held_out/letters_reward/mean"):
        parts = {**first.history(name), **second.history(name)}
        if not name.startswith("held_out"):
            assert (set(first.history(name)), set(second.history(name))) == ({1, 2, 3, 4, 5}, {6, 7, 8})
        assert parts == whole.history(name), name
    assert len(set(whole.history("learning_rate").values())) == STEPS


def test_a_resumed_run_is_a_run_of_its_own_below_the_first(stopped, resumed):
    first, second = recorded(stopped), recorded(resumed)
    assert (first.status, second.status) == ("KILLED", "FINISHED")
    assert second.tags["mlflow.parentRunId"] == second.tags["resumed_from_run"] == first.id
    assert second.tags["resumed_at_step"] == "5" and second.tags["changed"] == "nothing"
    assert resumed.run_dir != stopped.run_dir
    before = [next(line for line in run.said.splitlines() if "before" in line) for run in (stopped, resumed)]
    assert before[0] == before[1]  # from the checkpoint, not asked again


def test_resume_is_exact_with_a_reference_reused_completions_and_accumulated_gradients(lab, tmp_path):
    """A stop waits for the end of the rollout: its completions are no part of a checkpoint. Nor is a second adapter.

    Two groups of four answers in four passes of two, two to a step, and each of them twice: four steps a rollout.
    """
    more = ("--num-iterations", 2, "--gradient-accumulation-steps", 2, "--per-device-train-batch-size", 2,
            "--steps-per-generation", 4, "--save-steps", 3, "--beta", 0.1, "--max-steps", 10)  # fmt: skip
    whole = lab(tmp_path / "whole", *more)
    broken = lab(tmp_path / "broken", *more, AT="5", DO="SIGTERM")
    assert {folder.name for folder in whole.run_dir.glob("checkpoints/*")} == {"checkpoint-8", "checkpoint-10"}
    assert set(recorded(whole).history("reward")) == {1, 5, 9} and set(recorded(whole).history("loss")) == set(range(1, 11))
    assert broken.code == 143 and "step  8/10" in broken.said and "step  9/10" not in broken.said
    rest = resume(lab, broken, *more)
    assert rest.code == 0 and same(whole.run_dir / "final-adapter", rest.run_dir / "final-adapter")
    kl = recorded(whole).history("kl")
    assert kl[10] > 0 and kl == {**recorded(broken).history("kl"), **recorded(rest).history("kl")}
    assert len(weights(rest.run_dir / "checkpoints" / "checkpoint-10")) == 28
    assert not list(rest.run_dir.glob("*/*/ref"))


def test_two_seeds_differ(lab, unbroken, tmp_path):
    other = lab(tmp_path, "--seed", 1)
    assert recorded(other).history("reward") != recorded(unbroken).history("reward")
    assert not same(other.run_dir / "final-adapter", unbroken.run_dir / "final-adapter")


def test_the_config_is_the_checkpoints_and_a_change_is_recorded(lab, stopped, tiny, tmp_path):
    done = lab(tmp_path, "--resume-from-checkpoint", stopped.run_dir, "--learning-rate", 5e-3, "--weight-decay", 0.1,
               "--eval-problems", 2)  # fmt: skip
    assert done.code == 0, done.said
    run = recorded(done)
    assert run.tags["changed"] == "eval_problems: 4 -> 2; learning_rate: 0.01 -> 0.005; weight_decay: 0.001 -> 0.1"
    assert set(run.history("held_out/letters_reward")) == {0, 8}  # of other problems, so asked anew
    assert "; changed: eval_problems: 4 -> 2, learning_rate: 0.01 -> 0.005, weight_decay: 0.001 -> 0.1\n" in done.said
    state = torch.load(done.run_dir / "checkpoints" / "checkpoint-8" / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["weight_decay"] == 0.1
    assert run.params["max_completion_length"] == "8" and run.params["model_requested"] == str(tiny)
    assert run.history("learning_rate")[6] == pytest.approx(5e-3 * 3 / 8)


def test_the_way_to_go_on_keeps_the_flags_of_a_run_without_a_checkpoint(lab, stopped, tmp_path):
    changes = ("--learning-rate", 5e-3, "--gradient-checkpointing", "--save-steps", 50)
    run = lab(tmp_path, "--resume-from-checkpoint", stopped.run_dir, *changes, AT="6", DO="SIGINT SIGINT")
    assert run.code == 130
    assert "/checkpoints/checkpoint-5 --gradient-checkpointing --learning-rate 0.005\n" in run.said


@pytest.fixture
def copied(stopped, tmp_path):
    shutil.copytree(stopped.run_dir / "checkpoints" / "checkpoint-5", tmp_path / "run" / "checkpoints" / "checkpoint-5")
    return tmp_path / "run" / "checkpoints" / "checkpoint-5"


def cut(file):
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda c: shutil.rmtree(c), "no such folder"),
        (lambda c: cut(c / "optimizer.pt"), "not whole (optimizer.pt is cut off); there is no whole one beside it"),
        (lambda c: cut(c / "adapter_model.safetensors"), "not whole (Error while deserializing header"),
        (lambda c: cut(c / "trainer_state.json"), "not whole (Unterminated string"),
        (lambda c: (c / "rng_state.pth").unlink(), "not whole (it lacks rng_state.pth)"),
        (lambda c: shutil.copytree(c, c.with_name("checkpoint-4")) and (c / "lab.json").unlink(), "the last whole one: "),
        (lambda c: [file.unlink() for file in c.iterdir()], "no whole checkpoint in there"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused_in_one_line(lab, copied, damage, says, tmp_path):
    damage(copied)
    run = lab(tmp_path, "--resume-from-checkpoint", copied)
    assert run.code == 2 and says in run.refused and str(copied) in run.refused and "\n" not in run.refused
    assert run.run_dir is None and not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lora-r", 8], "--lora-r 8: the checkpoint is of 16; leave it away, or start anew"),
        (["--model", "smollm2-135m-instruct"], "--model smollm2-135m-instruct: the checkpoint is of "),
        (["--num-iterations", 2], "step 5 is between rollouts of 1, and not of 2 steps (--steps-per-generation, "),
        (["--steps-per-generation", 3], "step 5 is between rollouts of 1, and not of 3 steps (--steps-per-generation, "),
        (["--preset", "qwen3-4b"], "--preset qwen3-4b: the checkpoint is of smollm2; leave it away, or start anew"),
    ],
)
def test_another_model_and_a_finished_run_are_refused_in_one_line(lab, copied, arguments, says, tmp_path):
    run = lab(tmp_path, "--resume-from-checkpoint", copied, *arguments)
    assert run.code == 2 and says in run.refused and "\n" not in run.refused and run.run_dir is None


def test_only_the_target_modules_are_trained_and_a_resumed_run_keeps_to_them(lab, tmp_path):
    short = ("--max-steps", 3, "--save-steps", 1, "--eval-problems", 0, "--target-modules")
    run = lab(tmp_path, *short, "q_proj", "v_proj", AT="2", DO="SIGTERM")
    assert run.code == 143, run.said
    kept = weights(run.run_dir / "final-adapter")
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in kept}
    assert modules == {"q_proj", "v_proj"} and len(kept) == 2 * 2 * 2  # layers, modules, and A and B
    assert recorded(run).params["trainable_parameters"] == str(sum(tensor.numel() for tensor in kept.values()))
    again = lab(tmp_path, "--resume-from-checkpoint", "last", "--target-modules", "q_proj", "k_proj")
    assert again.code == 2 and again.run_dir is None
    assert "--target-modules k_proj q_proj: the checkpoint is of q_proj v_proj; leave it away, or start anew" in again.refused
    again = lab(tmp_path, "--resume-from-checkpoint", "last", "--target-modules", "v_proj", "q_proj")  # the same ones
    assert again.code == 0 and weights(again.run_dir / "final-adapter").keys() == kept.keys(), again.said + again.refused
    assert recorded(again).tags["changed"] == "nothing"


def test_a_finished_run_is_refused_and_can_be_made_longer(lab, unbroken, tmp_path):
    run = lab(tmp_path, "--resume-from-checkpoint", unbroken.run_dir)
    assert run.code == 2 and "finished, 8 of 8 steps are done; --max-steps 16 adds as many" in run.refused
    run = lab(tmp_path, "--resume-from-checkpoint", unbroken.run_dir, "--max-steps", 9)
    assert run.code == 0 and set(recorded(run).history("loss")) == {9}


def test_a_run_that_fails_in_its_last_evaluation_goes_on_there(lab, tmp_path):
    run = lab(tmp_path, SCORES="1 fails")
    assert run.code == 1 and "failed in the evaluation after training: letters_reward raised ValueError" in run.said
    assert "checkpoints/checkpoint-8\n" in run.said and recorded(run).status == "FAILED"
    rest = resume(lab, run, SCORES="3")
    assert rest.code == 0 and recorded(rest).history("held_out/letters_reward") == {8: 0.75}
    assert "all 8 steps are done: only saving and the evaluation are left" in rest.said
    assert same(run.run_dir / "final-adapter", rest.run_dir / "final-adapter")


def test_last_without_any_is_refused(lab, tmp_path):
    run = lab(tmp_path, "--resume-from-checkpoint", "last")
    assert run.code == 2 and "last: no whole checkpoint below outputs" in run.refused


def test_kill_9_while_a_checkpoint_is_written(tiny, lab, tmp_path):
    """The last checkpoint is whole, and the run that stayed RUNNING is closed by the one that goes on from it."""
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    arguments = [*map(str, command_line(tiny, "--save-steps", 1, "--max-steps", 1000, "--eval-problems", 0))]
    shell = f'exec "{sys.executable}" "{ROOT / "train.py"}" "$@" >&- 2>&-'  # also without a screen
    process = subprocess.Popen(
        ["sh", "-c", shell, "sh", *arguments], cwd=tmp_path, env={**os.environ, "MLFLOW_TRACKING_URI": store}
    )
    for _ in range(200_000):
        if written := list(tmp_path.glob("outputs/*/checkpoint-*")):
            if int(written[0].name.split("-")[1]) >= 4:
                break
        assert process.poll() is None
        time.sleep(0.0005)
    process.kill()
    process.wait()
    (run_dir,) = (tmp_path / "outputs").iterdir()
    killed = Recorded(store, run_dir)
    found = sorted(run_dir.glob("checkpoints/*"), key=checkpoints.step_of)
    assert found and all(checkpoints.what_is_wrong(folder) is None for folder in found)
    assert checkpoints.step_of(found[-1]) >= 3 and len(found) <= 3
    assert killed.status == "RUNNING"
    steps = checkpoints.step_of(found[-1]) + 2
    run = lab(tmp_path, "--resume-from-checkpoint", "last", "--max-steps", steps, "--eval-problems", 0)
    assert run.code == 0 and Recorded(store, run_dir).status == "KILLED"
    assert recorded(run).tags["mlflow.parentRunId"] == killed.id


# failures


def test_a_reward_that_ends_the_process_is_a_failure_and_the_next_call_is_clean(lab, tmp_path):
    run = lab(tmp_path / "exit", AT="4", DO="exit")
    assert run.code == 1 and "failed in training, step 4: SystemExit: a reward that ends the process" in run.said
    assert (run.run_dir / "final-adapter" / "adapter_model.safetensors").is_file() and "adapter after step 3" in run.said
    record = recorded(run)
    assert record.status == "FAILED" and record.tags["error"] == "SystemExit: a reward that ends the process"
    assert "in letters_reward" in record.read("failure.txt", tmp_path) and "lora" in record.artifacts()
    assert mlflow.active_run() is None
    run = lab(tmp_path / "next", "--max-steps", 1)
    assert run.code == 0 and recorded(run).status == "FINISHED"


def test_a_gradient_that_is_no_number_stops_with_the_last_good_adapter(lab, tmp_path):
    run = lab(tmp_path, "--save-steps", 2, AT="4", DO="infinite")
    assert run.code == 1 and "Diverged: grad_norm is nan in step 4, which was not taken" in run.said
    assert "checkpoints/checkpoint-2\n" in run.said and recorded(run).status == "FAILED"
    assert all(tensor.isfinite().all() for tensor in weights(run.run_dir / "final-adapter").values())


def test_a_reward_that_is_no_number_in_mid_run_is_told(lab, tmp_path):
    """TRL by itself takes it for one that does not apply, and trains on."""
    run = lab(tmp_path, AT="4", DO="nan")
    assert run.code == 1 and "failed in training, step 4: letters_reward returned nan (float) among its values" in run.said
    assert "adapter after step 3" in run.said and recorded(run).status == "FAILED"


def test_memory_that_runs_out_is_explained(lab, tmp_path):
    run = lab(tmp_path, AT="3", DO="huge")
    assert run.code == 1 and "out of RAM in the reward functions (training, step 3): " in run.said
    assert "out of RAM in the reward functions" in recorded(run).read("failure.txt", tmp_path)


def test_a_start_that_hangs_is_ended_and_recorded(tmp_path):
    """The limit of vLLM's start, with a sleep for the hang, in a process of its own since it ends there."""
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    code = (
        "import time, pathlib, engine, record, train, console\n"
        "store = record.connect(train.PROJECT, 'p7-grpo')\n"
        "run_dir = pathlib.Path('run')\n"
        "run_dir.mkdir()\n"
        "run = record.Record(train.PRESETS['smollm2'], None, train.PROJECT, store, run_dir, None)\n"
        "with console.Console(run_dir / 'train.log') as screen, engine.bounded_start(screen, run, seconds=1):\n"
        "    time.sleep(60)\n"
    )
    env = {**os.environ, "MLFLOW_TRACKING_URI": store, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50)
    assert (
        done.returncode == 1
        and "vLLM has not started within 1 s (--vllm-start-timeout); try again, or --backend unsloth" in done.stdout
    ), done
    assert "Thread" in (tmp_path / "run" / "train.log").read_text()
    record = Recorded(store, tmp_path / "run")
    assert record.status == "FAILED" and "has not started" in record.tags["error"]


def test_two_very_first_starts_make_one_store(tmp_path):
    """MLflow makes a new database in some fifty steps; both reach it at the same moment."""
    code = (
        "import mlflow, os, pathlib, time, mlflow.store.db.utils, record\n"
        "pathlib.Path(f'ready-{os.getpid()}').touch()\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.001)\n"
        "record.connect(pathlib.Path('.').resolve(), 'p7-grpo')\n"
    )
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}", "PYTHONPATH": str(ROOT)}
    starts = [subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env) for _ in range(2)]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    (tmp_path / "go").touch()
    assert [start.wait(60) for start in starts] == [0, 0]


def test_an_output_folder_that_is_gone_is_told_and_the_adapter_kept(lab, tmp_path):
    run = lab(tmp_path, AT="4", DO="delete outputs/*")
    assert run.code == 1 and re.search(r"failed in training, step 4: OSError: .*non-existent directory", run.said)
    (kept,) = tmp_path.glob("outputs/*/final-adapter")
    assert f"adapter after step 4: {kept}" in run.said and len(weights(kept)) == 28


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 520 MB, as the output folder."""
    disk = tmp_path / "outputs"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=520m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a file system of its own takes the right to mount one")
    yield disk
    while subprocess.run(["umount", disk], capture_output=True).returncode == 0:
        pass


def test_a_full_disk_is_told_and_the_adapter_kept_elsewhere(tiny, disk, tmp_path):
    """In a process of its own, whose log is on that disk too."""
    arguments = command_line(tiny, "--save-steps", 2, "--eval-problems", 0)
    done = run_script(*arguments, cwd=tmp_path, AT="4", DO=f"fill {disk}")
    (run_dir,) = disk.glob("*/")
    assert done.code == 1 and re.search("failed in training, step 4: OSError: .*No space left on device", done.stdout), done
    kept = tmp_path / f"{run_dir.name}-final-adapter"
    assert len(weights(kept)) == 28 and f"adapter after step 4: {kept}" in done.stdout and done.stderr == ""
    assert (
        "--output-dir outputs: make room there" in done.stdout and f"{run_dir.name}/checkpoints/checkpoint-2\n" in done.stdout
    )
    record = Recorded(f"sqlite:///{tmp_path / 'mlflow.db'}", run_dir)
    assert record.status == "FAILED" and set(record.history("loss")) >= {1, 2, 3}
    assert {"lora", "reward_curve.png"} <= record.artifacts() and not (run_dir / "reward_curve.png").exists()


def test_a_disk_that_becomes_read_only_is_told_and_the_adapter_kept_elsewhere(lab, disk, tmp_path):
    run = lab(tmp_path, "--save-steps", 2, AT="4", DO=f"read-only {disk}")
    assert run.code == 1 and re.search("failed in training, step 4: OSError: .*Read-only file system", run.said), run.said
    kept = tmp_path / f"{run.run_dir.name}-final-adapter"
    assert len(weights(kept)) == 28 and f"adapter after step 4: {kept}" in run.said
    assert f"{run.run_dir.name}/checkpoints/checkpoint-2\n" in run.said and recorded(run).status == "FAILED"


# the record


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("faulty") / "server")
    yield server
    server.kill()


def no_room_for_files(folder):
    """A file where the server's folder for artifacts was: nothing can be written below it, not even by root."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("")


def test_a_server_without_room_for_files_is_refused_before_the_model_loads(lab, server, tmp_path):
    no_room_for_files(server.folder / "artifacts")
    run = lab(tmp_path, "--experiment", "full", MLFLOW_TRACKING_URI=server.address)
    (server.folder / "artifacts").unlink()
    assert run.code == 2 and run.seconds < 15 and run.run_dir is None
    assert f"MLFLOW_TRACKING_URI {server.address}: takes no artifacts" in run.refused
    assert "uv run mlflow server --artifacts-destination ./mlartifacts" in run.refused and "\n" not in run.refused
    client = mlflow.MlflowClient(server.address)
    assert not client.search_runs([client.get_experiment_by_name("full").experiment_id])


def test_an_upload_that_fails_at_the_end(lab, server, tmp_path):
    """The server takes numbers, and no files any more."""
    files = server.folder / "artifacts"
    run = lab(tmp_path, "--eval-problems", 0, MLFLOW_TRACKING_URI=server.address, AT="3", DO=f"file {files}")
    files.unlink()
    assert run.code == 3 and run.seconds < 60, run.said
    missing = run.said[run.said.index("NOT RECORDED") :]
    assert "lora" in missing and "metrics" not in missing and "status" not in missing
    assert len(weights(run.run_dir / "final-adapter")) == 28
    record = recorded(run)
    assert record.status == "FINISHED" and set(record.history("reward")) == set(range(1, STEPS + 1))


def test_a_server_that_hangs_holds_up_neither_training_nor_a_user_in_a_hurry(lab, server, tmp_path):
    def hurry():
        while "sending the rest of the record" not in (tmp_path / "screen").read_text():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    (tmp_path / "screen").write_text("")
    threading.Thread(target=hurry, daemon=True).start()
    run = lab(tmp_path, "--eval-problems", 0, MLFLOW_TRACKING_URI=server.address, AT="3", DO=f"freeze {server.process.pid}")
    os.killpg(server.process.pid, signal.SIGCONT)
    assert run.code == 3 and run.seconds < 30 and "step 8/8" in run.said
    assert "NOT RECORDED" in run.said and "status FINISHED" in run.said
    with mock.patch.dict(os.environ, MLFLOW_TRACKING_URI=server.address):
        for _ in range(100):  # the thread that waits for the server ends with the process, which here goes on
            with contextlib.suppress(Refused):
                assert "status FINISHED" in upload(run.run_dir, tmp_path)
                break
            time.sleep(0.1)
    assert recorded(run).status == "FINISHED" and set(recorded(run).history("reward")) == set(range(1, STEPS + 1))


@pytest.mark.parametrize("address", ["sqlite:///{}", "sqlite:/lab.db"])  # a folder, and a slash too few
def test_a_database_that_cannot_be_opened_is_refused_in_time(lab, tmp_path, address):
    store = address.format(tmp_path)
    run = lab(tmp_path, MLFLOW_TRACKING_URI=store)
    assert run.code == 2 and run.seconds < 15 and f"MLFLOW_TRACKING_URI {store}: " in run.refused


def test_a_server_that_dies_loses_nothing(lab, server, tmp_path):
    run = lab(tmp_path, "--sample-steps", 2, MLFLOW_TRACKING_URI=server.address,
              AT="3", DO=f"kill {server.process.pid}")  # fmt: skip
    server.process.wait()
    assert run.code == 3 and run.seconds < 60 and "step 8/8" in run.said, run.said
    assert (run.run_dir / "final-adapter" / "adapter_model.safetensors").is_file()
    said = run.said[run.said.index("NOT RECORDED in ") :]
    assert "metrics of steps " in said and " to 8" in said and "lora" in said
    assert "reward_curve.png, step_time.png, status FINISHED" in said

    # as it is printed, with the server still away: refused in one line
    words = shlex.split(said.partition("with MLFLOW_TRACKING_URI as it was: ")[2])
    assert words[:5] == ["uv", "run", "--project", str(ROOT), "python"]
    send = [sys.executable, *words[5:]]
    env = {**os.environ, "MLFLOW_TRACKING_URI": server.address}
    done = subprocess.run(send, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and server.address in done.stderr

    # then it is back: all of it arrives, once
    server.start()
    done = subprocess.run(send, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "lora" in done.stdout, done.stderr
    with mock.patch.dict(os.environ, env):
        assert upload(run.run_dir, tmp_path).endswith("sent nothing, for it has all")
    record = recorded(run)
    points = record.client.get_metric_history(record.id, "reward")
    assert [metric.step for metric in points] == list(range(1, STEPS + 1))
    samples = json.loads(record.read("samples.json", tmp_path))["data"]
    steps = [row[0] for row in samples]
    assert steps == sorted(steps) and set(steps) == {2, 4, 6, 8}
    # what the server took as it died, without an answer, is there twice (see journal.Journal)
    assert {steps.count(step) for step in (4, 6, 8)} == {4} and steps.count(2) in (4, 8)
    assert "lora/adapter_model.safetensors" in record.artifacts("lora") and record.status == "FINISHED"
    for name in ("reward_curve.png", "step_time.png"):
        drawn = Path(record.client.download_artifacts(record.id, name, tmp_path))
        assert drawn.read_bytes() == (run.run_dir / name).read_bytes()

    # and into another store, where the run is new
    with mock.patch.dict(os.environ, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path / 'other.db'}"), contextlib.chdir(tmp_path):
        assert ", new run " in upload(run.run_dir, tmp_path)
        assert upload(run.run_dir, tmp_path).endswith("sent nothing, for it has all")
    copy = Recorded(f"sqlite:///{tmp_path / 'other.db'}", run.run_dir)
    assert copy.history("reward") == record.history("reward") and copy.params == record.params
    assert copy.status == "FINISHED" and "lora" in copy.artifacts()


def test_a_figure_that_cannot_be_drawn_is_told_and_stops_nothing(lab, tmp_path):
    with mock.patch.dict(pictures.FIGURES, reward_curve=mock.Mock(side_effect=ValueError("no ink"))):
        run = lab(tmp_path, "--max-steps", 1, "--eval-problems", 0)
    assert run.code == 0 and "reward_curve.png could not be drawn: ValueError: no ink\n" in run.said
    assert recorded(run).status == "FINISHED" and "reward_curve.png" not in recorded(run).artifacts()


def test_a_server_that_never_answers_is_refused_in_time(lab, tmp_path):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        run = lab(tmp_path, MLFLOW_TRACKING_URI=f"http://127.0.0.1:{deaf.getsockname()[1]}")
    assert run.code == 2 and run.seconds < 15 and "uv run mlflow server" in run.refused


def test_an_outer_run_and_a_long_parameter_split_nothing(lab, tmp_path):
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.set_tracking_uri(store)
    long = "a " * 3500
    mlflow.set_experiment("outer")
    with mlflow.start_run() as outer:
        run = lab(tmp_path, "--max-steps", 2, "--system", long, "--max-prompt-length", 8000, MLFLOW_RUN_ID=outer.info.run_id)
        assert mlflow.active_run().info.run_id == outer.info.run_id
    assert run.code == 0, run.said
    record = recorded(run)
    assert record.id != outer.info.run_id and set(record.history("loss")) == {1, 2} and record.status == "FINISHED"
    assert record.params["lora_r"] == "16" and json.loads(record.read("config.json", tmp_path))["system"] == long
    assert not mlflow.MlflowClient(store).get_run(outer.info.run_id).data.metrics


# what is said when learning stalls, and which adapter is kept


def test_rewards_that_are_all_zero_are_told_with_three_samples(lab, tmp_path):
    run = lab(tmp_path, "--max-steps", 11, "--sample-steps", 0, PAY="nothing")
    assert run.code == 0 and "B is all 0: nothing was learned; no group had spread, or" in run.said
    warning = run.said.index("warning: every reward of the last 40 completions is 0")
    assert [line.startswith("    'What is ") for line in run.said[warning:].splitlines()[1:5]] == [True, True, True, False]
    record = recorded(run)
    assert record.history("warning/all_zero") == {10: 1}
    assert "every reward" in record.read("warnings.json", tmp_path)


def test_the_best_adapter_is_kept_also_over_a_stop(lab, tmp_path):
    """Right answers of 4 before, after step 2, 4, 6, and at the end: the best comes second, and its equal does not count."""
    more = ("--eval-steps", 2, "--save-steps", 2, "--save-total-limit", 5)
    run = lab(tmp_path, *more, SCORES="0 1 3 3 2", AT="7", DO="SIGTERM")
    assert run.code == 143
    assert recorded(run).history("held_out/letters_reward") == {0: 0, 2: 0.25, 4: 0.75, 6: 0.75}
    best = run.run_dir / "best-adapter"
    assert same(best, run.run_dir / "checkpoints" / "checkpoint-4")
    assert not same(best, run.run_dir / "checkpoints" / "checkpoint-6")
    rest = resume(lab, run, *more, SCORES="2")
    assert f"best adapter: step 4, letters_reward 0.750: {best}" in rest.said and not (rest.run_dir / "best-adapter").exists()
    assert "lora-best/adapter_model.safetensors" in recorded(rest).artifacts("lora-best")
    # a run that was killed after a better evaluation than its last checkpoint knows of
    early = lab(tmp_path, "--resume-from-checkpoint", run.run_dir / "checkpoints" / "checkpoint-2", SCORES="2 2 2 2")
    assert f"best adapter: step 4, letters_reward 0.750: {best}" in early.said


def test_only_the_last_checkpoints_are_kept(unbroken, lab, tmp_path):
    run = lab(tmp_path, "--max-steps", 5, "--save-steps", 1, "--save-total-limit", 3)
    assert {folder.name for folder in run.run_dir.glob("checkpoints/*")} == {"checkpoint-3", "checkpoint-4", "checkpoint-5"}
    assert not list(run.run_dir.glob("checkpoint-*"))
    assert {folder.name for folder in unbroken.run_dir.glob("checkpoints/*")} == {"checkpoint-4", "checkpoint-8"}


SPREAD = {"step": 3, "frac_reward_zero_std": 0.5, "learning_rate": 1e-5, "completions/clipped_ratio": 1.0}


@pytest.mark.parametrize(
    ("change", "history", "masked", "says"),
    [
        ({}, [SPREAD], False, None),
        ({"lora_B": 0}, [SPREAD], False, "B is all 0, although groups had spread in 1 steps (the first: 3)"),
        ({"lora_B": 0}, [SPREAD], True, None),  # all cut off, so all left out of the loss
        ({"lora_B": 0}, [{**SPREAD, "frac_reward_zero_std": 1.0}], False, None),
        ({"lora_B": 0}, [{**SPREAD, "learning_rate": 0.0}], False, None),  # warming up
        ({"lora_B": 0}, [{"step": 1, "learning_rate": 1.0}], False, None),
        ({"lora_A": float("nan")}, [], False, "of 28 tensors hold NaN or infinity"),
        ({"lora_B": float("inf")}, [], False, "of 28 tensors hold NaN or infinity"),
        ({"lora_B": None}, [], False, "14 tensors, 0 of them a B"),
        ({"base": "another"}, [], False, "names another as its base model"),
    ],
)
def test_a_saved_adapter_is_looked_at(unbroken, tiny, tmp_path, change, history, masked, says):
    folder = tmp_path / "adapter"
    shutil.copytree(unbroken.run_dir / "final-adapter", folder)
    tensors = {}
    for name, tensor in weights(folder).items():
        part = "lora_A" if "lora_A" in name else "lora_B"
        if part not in change:
            tensors[name] = tensor
        elif change[part] is not None:
            tensors[name] = torch.full_like(tensor, change[part])
    save_file(tensors, folder / "adapter_model.safetensors")
    if "base" in change:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": change["base"]}))
    if says is None:
        assert (adapter.check(folder, str(tiny), history, masked) == 0) == (change == {"lora_B": 0})
    else:
        with pytest.raises(adapter.BadAdapter, match=re.escape(says)):
            adapter.check(folder, str(tiny), history, masked)
