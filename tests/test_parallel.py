"""Two processes of one run on a CPU: the training of one with the same batch, one record, and ends that leave nothing behind.

Most are forked from a process that has imported the libraries once. What a launcher adds is tried with torchrun and accelerate.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pandas
import psutil
import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

import benchmark
import compare
import journal
import parallel
import stopping
import train as script
from checks import Refused, check_problems, notes
from conftest import ENVIRONMENT, ROOT
from stopping import Stop

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on a CPU: CUDA_VISIBLE_DEVICES= uv run pytest")
TASK = Path(__file__).with_name("faulty_task.py")
BIN = Path(sys.executable).parent
HEAD = '{"run_id": "abc", "run_name": "r", "experiment": "e"}\n'  # of a run's journal


# one process


@pytest.fixture
def environment(monkeypatch):
    def environment(**variables):
        for name in parallel.LAUNCHERS:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return environment


def test_which_process_this_is(environment):
    environment()
    assert parallel.find() == parallel.World(0, 1)
    environment(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT="29500")
    assert parallel.find() == parallel.World(1, 2)
    assert not parallel.find().is_main


def test_a_launcher_with_one_process_is_none(environment):
    environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="none")
    assert parallel.find() == parallel.World()
    assert not set(parallel.LAUNCHERS) & set(os.environ)


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2 with RANK (none): these are a launcher's, and not all there"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_PORT": "1"}, "WORLD_SIZE 2 with RANK 2"),
        ({"WORLD_SIZE": "two", "RANK": "0", "MASTER_PORT": "1"}, "WORLD_SIZE two with RANK 0"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_MAX_RESTARTS": "2"}, "--max-restarts: leave it"),
        ({"WORLD_SIZE": "4", "RANK": "0", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}, "4 processes, 2 of them here"),
    ],
)
def test_half_a_launcher_is_refused(environment, variables, said):
    environment(**variables)
    with pytest.raises(Refused, match=re.escape(said)):
        parallel.find()


def test_scripts_that_start_runs_take_no_launcher(environment):
    environment(RANK="0", WORLD_SIZE="2", MASTER_PORT="29500")
    with pytest.raises(Refused, match="compare.py starts its runs itself"):
        compare.main(["run"])
    with pytest.raises(Refused, match="benchmark.py starts its runs itself"):
        benchmark.main(["learn"])


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_a_model_in_parts_is_refused(environment, monkeypatch, name):
    environment(RANK="0", WORLD_SIZE="2", MASTER_PORT="29500")
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(Refused, match=f"ACCELERATE_USE_{name}: each process holds the whole model"):
        parallel.find()


def test_more_processes_than_cards(monkeypatch):
    cards = {0: SimpleNamespace(uuid="GPU-a"), 1: SimpleNamespace(uuid="GPU-b")}
    monkeypatch.setattr(parallel, "find_gpu", lambda i: (cards.get(i), ""))
    assert parallel.cards(parallel.World(0, 2)) == [(cards[0], ""), (cards[1], "")]
    for_three = r"3 processes and 2 visible cards \(CUDA_VISIBLE_DEVICES\): --nproc-per-node 2"
    with pytest.raises(Refused, match=for_three):
        parallel.cards(parallel.World(2, 3))
    cards[2] = cards[0]  # CUDA_VISIBLE_DEVICES=0,1,0
    with pytest.raises(Refused, match=for_three):
        parallel.cards(parallel.World(2, 3))
    cards.clear()
    assert parallel.cards(parallel.World(2, 3)) == [(None, "")] * 3


def test_what_is_not_recorded_is_a_method_of_the_record(tmp_path):
    silent = parallel.Unrecorded(parallel.World(1, 2), tmp_path, script.PROJECT, None, None)
    silent.metrics({"loss": 1.0}, 3)
    with pytest.raises(AttributeError, match="metricks"):
        silent.metricks({})


def test_each_sees_its_card_alone_and_nccl_is_small(monkeypatch):
    card = SimpleNamespace(cuda_name="3")
    monkeypatch.delenv("NCCL_MAX_NCHANNELS", raising=False)
    assert parallel.World(0, 1).environment(card) == {"CUDA_VISIBLE_DEVICES": "3"}
    several = {"CUDA_VISIBLE_DEVICES": "3", "LOCAL_RANK": "0", "NCCL_MAX_NCHANNELS": "4"}
    assert parallel.World(1, 2).environment(card) == several
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "16")
    assert parallel.World(1, 2).environment(card) == several | {"NCCL_MAX_NCHANNELS": "16"}


@pytest.mark.parametrize(
    "there, speaks, dead",
    [
        ("lll", [0], None),
        ("dll", [0, 1], 0),
        ("ddl", [0, 2], 0),  # the first one would, if it lived
        ("d-l", [0, 2], 0),  # the second one has signed off
        ("ldl", [0], 1),
        ("-ll", [0], None),  # the first one ended by itself
        ("ell", [0], None),  # the same, and had no time to sign off
    ],
)
def test_who_ends_the_record(tmp_path, there, speaks, dead):
    """By who lives, is dead, and has signed off."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    for rank, state in enumerate(there):
        if state != "-":
            (tmp_path / f".process.{rank}").write_text(str(os.getpid() if state == "l" else gone.pid))
        if state == "e":
            (tmp_path / journal.FILE).write_text(HEAD + '{"n": 0, "kind": "status", "status": "FAILED"}\n')
    asked = [rank for rank in range(3) if there[rank] == "l" or rank == 0]
    assert [rank for rank in asked if parallel.World(rank, 3).speaks(tmp_path)] == speaks
    failure = parallel.World(2, 3).others_failure(tmp_path)
    killed = f"process {dead} has ended without a word: killed, perhaps for memory"
    assert failure is None if dead is None else str(failure) == killed


def test_signing_on_and_off(tmp_path):
    for world in (parallel.World(0, 2), parallel.World(1, 2)):
        world.sign_on(tmp_path)
    assert parallel.World(0, 2).there(tmp_path) == {0: True, 1: True}
    parallel.World(1, 2).sign_off(tmp_path)
    assert parallel.World(0, 2).there(tmp_path) == {0: True}
    for world in (parallel.World(0, 1), parallel.World(1, 2)):
        world.sign_off(tmp_path / "nowhere")
    parallel.World(0, 1).sign_on(tmp_path / "nowhere")
    for broken in (tmp_path / "nowhere", tmp_path / ".process.0"):  # no folder, and a file in its place
        assert parallel.World(1, 2).there(broken) == {} and parallel.World(1, 2).others_failure(broken) is None


def test_an_end_that_cannot_be_written_down_is_told(tmp_path):
    """By a process that holds the record, and one that lets go of it."""
    (tmp_path / journal.FILE).write_text(HEAD)
    other = parallel.Unrecorded(parallel.World(1, 2), tmp_path, script.PROJECT, None, None)
    other.speaks = True
    with open(tmp_path / journal.FILE) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert other.end("FAILED", print).startswith("NOT RECORDED (Resource temporarily unavailable): the run stays RUNNING")
        timer = threading.Timer(0.5, fcntl.flock, [held, fcntl.LOCK_UN])
        timer.start()
        journal.end_for_another(tmp_path, "gone", "gone")
        timer.join()
    assert journal.has_ended(tmp_path)


def test_a_slow_store_does_not_hold_up_the_end(tmp_path, monkeypatch):
    """The launcher would kill: what is missing is sent later."""
    monkeypatch.setattr(parallel, "SENDING", 0.2)
    monkeypatch.setattr(parallel.record, "upload", lambda folder, project: time.sleep(30))
    (tmp_path / journal.FILE).write_text(HEAD)
    other = parallel.Unrecorded(parallel.World(1, 2), tmp_path, script.PROJECT, None, None)
    assert other.end("FAILED", print) is None and not journal.read(tmp_path)[2]  # it is not its part
    other.speaks = True
    other.failure(parallel.OtherFailed("process 0 is gone"), "process 0 is gone")
    began = time.monotonic()
    assert other.end("FAILED", print) == (
        f"NOT RECORDED yet: not sent within 0.2 s.\n{parallel.record.how_to_send(tmp_path, script.PROJECT)}"
    )
    assert time.monotonic() - began < 5
    assert [item.get("values") or item.get("status") for item in journal.read(tmp_path)[2]] == [
        {"error": "OtherFailed: process 0 is gone"}, None, "FAILED"]  # fmt: skip


@pytest.mark.parametrize(
    "before, numbers",
    [
        ('{"n": 0, "kind": "params", "values": {}}\n{"sent": 0}\n', [0, 1, 2, 3]),
        ('{"n": 0, "kind": "params", "values": {}}\n{"n": 1, "kind": "metr', [0, 1, 2, 3]),  # killed in the midst of a line
        ('{"sent": 7}\n', [8, 9, 10]),  # a disk that was full for a while
        ('{"n": 0, "kind": "status", "status": "KILLED"}\n', [0]),  # somebody has said it already
    ],
)
def test_the_end_of_another_is_written_down_once(tmp_path, before, numbers):
    (tmp_path / journal.FILE).write_text(HEAD + before)
    for _ in range(2):
        journal.end_for_another(tmp_path, "OtherFailed: gone", "the story")
    items = journal.read(tmp_path)[2]
    assert [item["n"] for item in items] == numbers
    assert [item["status"] for item in items if item["kind"] == "status"] == ["KILLED" if len(numbers) == 1 else "FAILED"]


def test_what_several_processes_do_is_said_and_needs_problems():
    config = dataclasses.replace(script.PRESETS["smollm2"], processes=2)
    assert notes(config) == [
        "2 processes: 16 completions a step, 2 problems a rollout, shared out in whole groups; --learning-rate 0.0003 is not "
        "scaled with their number"
    ]
    check_problems(dataclasses.replace(config, processes=512))
    with pytest.raises(Refused, match="--train-problems 512: one rollout of 513 processes takes 513 problems"):
        check_problems(dataclasses.replace(config, processes=513))


@pytest.mark.parametrize("leaving", [True, False])
def test_a_launchers_signal_hurries_nothing_at_first(monkeypatch, leaving):
    """It comes also because another process has ended. Before the launcher kills, what is under way is given up."""
    monkeypatch.setattr("stopping.PATIENCE", 1.5)
    ended, done = [], threading.Event()

    def end(how):
        ended.append(how)
        done.set()

    with Stop(launched=True) as stop, contextlib.ExitStack() as stack:
        stop.give_up, stop.hurry = lambda: end("give_up"), lambda: end("hurry")
        stop.leave() if leaving else stack.enter_context(stop.training())
        os.kill(os.getpid(), signal.SIGTERM)
        assert not done.wait(0.5)
        assert done.wait(20) and ended == ["hurry" if leaving else "give_up"]
    assert stop.asked == (None if leaving else signal.SIGTERM)


@pytest.mark.parametrize(
    "failure, said",
    [
        (None, "SIGTERM: stopping once this step is done; once more stops at once"),
        ("process 1 has ended without a word", "process 1 has ended without a word; this one ends in about 20 s"),
    ],
)
def test_a_launchers_signal_is_said_with_its_reason(tmp_path, failure, said):
    with open(tmp_path / "screen", "w") as screen, Stop(launched=True) as stop, stop.training():
        stop.screen, stop.others_failure = screen.fileno(), lambda: failure
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 20
        while not (tmp_path / "screen").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert (tmp_path / "screen").read_text() == f"{said}\n"


def test_a_signal_that_others_have_told_of_is_not_said_twice():
    with Stop(launched=True) as stop, stop.training():
        stop.asked = signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # its own copy, later: no Stopped
    assert stop.asked == signal.SIGTERM


# two processes, forked


def run(rank, size, port, folder, arguments, variables, answers):
    """A process of a launch: train.main, its screen in a file; with `answers` its samples depend on the prompt alone."""
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (launched | variables).items()})
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
    os.chdir(folder)
    for fd in (1, 2):
        os.dup2(os.open(f"screen.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), fd)
    torch.set_num_threads(1)
    parallel.World.stamp = lambda world: os.environ["STAMP"]
    stopping.PATIENCE = float(os.environ.get("PATIENCE", stopping.PATIENCE))
    if answers:
        import cpu_trainer

        cpu_trainer.CPUTrainer._generate_single_turn = sample_by_the_prompt
    script.main([str(argument) for argument in arguments])


def sample_by_the_prompt(trainer, prompt_ids, *others, **named):
    groups, drawn = {}, []
    for ids in prompt_ids:
        groups[tuple(ids)] = groups.get(tuple(ids), -1) + 1
        dice = random.Random(f"{ids} {groups[tuple(ids)]}")
        drawn.append([dice.randrange(1000, 40000) for _ in range(dice.randrange(3, 9))])
    return drawn, None


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Start so many processes, and wait for them: returns exit codes, screens, the run's folder and its record."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["unsloth", "train", "trl", "cpu_trainer", "progress", "held_out", "vram", "mlflow"])
    os.environ.update({**script.ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    launches = itertools.count()

    def launch(*arguments, size=2, folder=None, answers=False, **variables):
        folder = folder or tmp_path_factory.mktemp("launch")
        before = set((folder / "outputs").glob("*"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        variables["STAMP"] = next(launches)  # all launches have one parent, by which folders would be named
        processes = [
            context.Process(target=run, args=(rank, size, port, folder, arguments, variables, answers)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        deadline, told = time.monotonic() + 120, None
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            time.sleep(0.1)
            if variables.get("DO") == "STOP" and psutil.Process(processes[1].pid).status() == psutil.STATUS_STOPPED:
                processes[0].terminate()
                processes[0].join(60)
                break
            if told is None and any(process.exitcode for process in processes):  # as a launcher does
                told = [process.terminate() for process in processes if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        return ended(folder, [process.exitcode for process in processes], before)

    return launch


def ended(folder, code, before=()):
    """What a launch has left in a folder."""
    (run_dir,) = set((folder / "outputs").glob("*")) - set(before)
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("p7-grpo").experiment_id])  # the latest one first
    screens = "".join(file.read_text() for file in sorted(folder.glob("screen*")))
    return SimpleNamespace(code=code, folder=folder, run_dir=run_dir, client=client, runs=runs, record=runs[0], said=screens)


def series(done, name):
    return {point.step: point.value for point in done.client.get_metric_history(done.record.info.run_id, name)}


@pytest.fixture(scope="module")
def flags(tiny):
    return ["--preset", "smollm2", "--model", tiny, "--task", TASK, "--max-steps", 6, "--train-problems", 10,
            "--num-generations", 4, "--per-device-train-batch-size", 4, "--max-completion-length", 8, "--eval-problems", 0,
            "--learning-rate", 1e-2, "--warmup-steps", 0, "--beta", 0.05, "--save-steps", 3, "--sample-steps", 0]  # fmt: skip


def test_two_processes_train_as_one_with_the_same_batch(launch, flags):
    """Same problems, same answers: the losses of six steps and the adapter agree, up to the order of sums."""
    one = launch(*flags, "--gradient-accumulation-steps", 4, "--steps-per-generation", 4, size=1, answers=True)
    two = launch(*flags, "--gradient-accumulation-steps", 2, "--steps-per-generation", 2, answers=True)
    assert one.code == [0] and two.code == [0, 0], one.said + two.said
    for done, processes in ((one, "1"), (two, "2")):
        assert {name: done.record.data.params[name] for name in ("processes", "effective_batch", "prompts_per_rollout")} == {
            "processes": processes, "effective_batch": "16", "prompts_per_rollout": "4"}  # fmt: skip
    # TRL deals the answers of one process anew to its passes, so that the KL is a mean of other means
    for name, apart in {"reward": 1e-6, "loss": 1e-4, "grad_norm": 1e-4, "kl": 0.2}.items():
        expected, found = series(one, name), series(two, name)
        assert list(expected) == list(found) == [1, 2, 3, 4, 5, 6]
        assert found == pytest.approx(expected, rel=apart, abs=1e-6), name
    assert len(set(series(two, "loss").values())) > 3
    a, b = (load_file(done.run_dir / "final-adapter" / "adapter_model.safetensors") for done in (one, two))
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-4  # of 6e-2


@pytest.fixture(scope="module")
def straight(launch, flags):
    """Six steps with sampled answers, and evaluations."""
    return launch(*flags, "--eval-problems", 4, "--eval-steps", 3, GROUPS="groups")


def test_one_record_of_two_processes(straight):
    done = straight
    assert done.code == [0, 0], done.said
    assert [run.info.status for run in done.runs] == ["FINISHED"]
    assert done.record.data.params["learning_rate_rule"] == "as given, not scaled with processes"
    assert done.said.count("step 6/6") == done.said.count("curves: ") == done.said.count("held-out, after") == 1
    assert not (done.folder / "screen.1").read_text()
    assert "step 6/6" in (done.run_dir / "train.1.log").read_text()
    for rank in (0, 1):
        assert len(series(done, f"process/{rank}/tokens_per_second")) == 6
        assert min(series(done, f"process/{rank}/rss_peak_gib").values()) > 0.1
    assert list(series(done, "held_out/letters_reward")) == [0, 3, 6]
    assert {file.name for file in (done.run_dir / "checkpoints" / "checkpoint-6").glob("rng*")} == {
        "rng_state_0.pth", "rng_state_1.pth"}  # fmt: skip


def test_groups_are_whole_in_each_process(straight):
    told = [line.split() for line in (straight.folder / "groups").read_text().splitlines()]
    for step in range(1, 7):
        groups = {rank: prompts for at, rank, *prompts in told if at == str(step)}
        assert len(groups) == 2 and all(len(set(prompts)) == 1 and len(prompts) == 4 for prompts in groups.values())
        assert groups["0"][0] != groups["1"][0]
    for file in sorted((straight.run_dir / "completions").glob("*.parquet")):
        assert pandas.read_parquet(file)["completion"].map(str).nunique() == 8  # no two have the same random numbers


def test_going_on_with_as_many_and_with_fewer(launch, straight):
    from_3 = straight.run_dir / "checkpoints" / "checkpoint-3"
    again = launch("--resume-from-checkpoint", from_3, folder=straight.folder)
    assert again.code == [0, 0], again.said
    a, b = (load_file(done.run_dir / "final-adapter" / "adapter_model.safetensors") for done in (straight, again))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert series(again, "loss") == {step: loss for step, loss in series(straight, "loss").items() if step > 3}
    alone = launch("--resume-from-checkpoint", from_3, folder=straight.folder, size=1)
    assert alone.code == [0], alone.said
    assert alone.record.data.tags["changed"] == "processes: 2 -> 1"


@pytest.mark.parametrize("backend", ["trl", "paged"])
def test_other_back_ends(launch, flags, backend):
    done = launch(*flags, "--backend", backend, "--max-steps", 2)
    assert done.code == [0, 0], done.said
    assert len(set(series(done, "loss").values())) == 2


# launchers


def start(folder, *command, **variables):
    """A launcher in a session of its own, with its screen in a file."""
    env = {
        **ENVIRONMENT,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
    }
    with open(folder / "screen", "w") as screen:
        return subprocess.Popen([str(word) for word in command], cwd=folder, env={**env, **variables}, stdout=screen,
                                stderr=screen, start_new_session=True)  # fmt: skip


def test_the_others_fall_with_the_one_that_fails(tmp_path, flags):
    """Its error comes first, the run is FAILED with its words, and the last checkpoint can be gone on with."""
    (tmp_path / "broken_task.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(TASK.parent)!r})\nfrom faulty_task import EXAMPLES, make_dataset\n"
        "import faulty_task\ndef letters_reward(completions, trainer_state, **kwargs):\n"
        "    if os.environ['RANK'] == '1' and trainer_state.global_step == 4: raise ValueError('nobody told me')\n"
        "    return faulty_task.letters_reward(completions, trainer_state)\nREWARDS = [letters_reward]\n"
    )
    torchrun = start(
        tmp_path, BIN / "torchrun", "--standalone", "--nproc-per-node", 2, ROOT / "train.py", *flags, "--task", "broken_task.py"
    )
    assert torchrun.wait(240) == 1
    done = ended(tmp_path, 1)
    told = "process 1 failed in training, step 5: ValueError: nobody told me"
    first, last = done.said.index(told), done.said.index(f"failed in training, step 5: {told}")
    assert first < last < done.said.index("go on with: uv run --project") < done.said.index("Root Cause")
    assert "torchrun --standalone --nproc-per-node 2" in done.said and "NOT RECORDED" not in done.said
    assert done.record.info.status == "FAILED" and "adapter after step 4" in done.said
    assert [folder.name for folder in (done.run_dir / "checkpoints").iterdir()] == ["checkpoint-3"]
    failure = Path(done.client.download_artifacts(done.record.info.run_id, "failure.txt", str(tmp_path)))
    assert failure.read_text().startswith(told) and "raise ValueError('nobody told me')" in failure.read_text()


def test_a_process_that_is_killed(launch, flags):
    done = launch(*flags, AT=5, DO="SIGKILL", ONLY=1)
    assert done.code == [1, -signal.SIGKILL]
    assert "failed in training, step 5: process 1 has ended without a word" in done.said
    assert done.record.info.status == "FAILED" and (done.run_dir / "final-adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("others", ["wait", "sleep"])
def test_the_first_process_is_killed(launch, flags, others):
    """The next one says so, and closes the record; also where it hears nothing of it, as within NCCL."""
    done = launch(*flags, AT=5, DO="SIGKILL", ONLY=0, OTHERS=others, PATIENCE=2)
    assert done.code == [-signal.SIGKILL, 1]
    why = "process 0 has ended without a word: killed, perhaps for memory"
    said = (done.folder / "screen.1").read_text()
    assert f"failed in training, step 5: {why}" in said
    assert others == "wait" or f"{why}; this one ends in about 2 s" in said
    assert "--nproc-per-node 2" in said and "checkpoint-3" in said and f"run {done.record.info.run_id}: sent" in said
    assert done.record.info.status == "FAILED" and done.record.data.tags["error"] == f"OtherFailed: {why}"
    assert not list(done.run_dir.glob(".process.*"))
    assert sorted(series(done, "reward")) == [1, 2, 3, 4]


def test_a_reward_that_is_no_number_in_one_process(launch, flags):
    done = launch(*flags, AT=5, DO="nan", ONLY=1)
    assert done.code == [1, 1]
    said = "process 1 failed in training, step 5: letters_reward returned nan"
    assert (done.folder / "screen.1").read_text().startswith(said)
    assert f"failed in training, step 5: {said}" in (done.folder / "screen.0").read_text()
    assert done.record.data.tags["error"].startswith(f"OtherFailed: {said}")


def test_one_that_hangs_is_given_up(launch, flags):
    """The first one waits for a process that does not move, in a library: the launcher's signal still ends it, on record."""
    done = launch(*flags, AT=5, DO="STOP", ONLY=1, PATIENCE=1)
    assert done.code == [1, -signal.SIGKILL]
    assert "stopped in training, step 5, which takes longer than a launcher waits" in done.said
    assert "checkpoint-3" in done.said and done.record.info.status == "KILLED"


def test_sigterm_to_a_launcher(tmp_path, flags):
    launcher = start(tmp_path, BIN / "accelerate", "launch", "--multi_gpu", "--num_processes", 2, "--main_process_port", 0,
                     ROOT / "train.py", *flags, "--max-steps", 10000)  # fmt: skip
    deadline = time.monotonic() + 200
    while "step     4/" not in (tmp_path / "screen").read_text():
        assert launcher.poll() is None and time.monotonic() < deadline, (tmp_path / "screen").read_text()
        time.sleep(0.2)
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(60)
    done = ended(tmp_path, launcher.returncode)
    assert done.said.count("stopped by SIGTERM") == 1 and "without a word" not in done.said
    assert done.said.count("SIGTERM: stopping once this step is done") <= 1  # a step here is shorter than it takes to say so
    assert done.record.info.status == "KILLED"
    last = int(re.findall(r"step +(\d+)/10000", done.said)[-1])
    there = f"outputs/{done.run_dir.name}/checkpoints/checkpoint-{last}"
    assert f"--nproc-per-node 2 {ROOT / 'train.py'} --resume-from-checkpoint {there}" in done.said


def test_a_launcher_that_is_killed(tmp_path, flags):
    """Nobody else ends its processes then: they end as after SIGTERM."""
    torchrun = start(tmp_path, BIN / "torchrun", "--standalone", "--nproc-per-node", 2, ROOT / "train.py", *flags,
                     "--max-steps", 10000)  # fmt: skip
    deadline = time.monotonic() + 200
    while "step     2/" not in (tmp_path / "screen").read_text():
        assert torchrun.poll() is None and time.monotonic() < deadline, (tmp_path / "screen").read_text()
        time.sleep(0.2)
    workers = psutil.Process(torchrun.pid).children()
    torchrun.kill()
    torchrun.wait()
    gone, alive = psutil.wait_procs(workers, 60)
    assert len(gone) == 2 and not alive
    assert ended(tmp_path, None).record.info.status == "KILLED"


def test_a_refusal_is_said_once(tmp_path, flags):
    torchrun = start(tmp_path, BIN / "torchrun", "--standalone", "--nproc-per-node", 2, ROOT / "train.py", *flags, "--beta", -1)
    assert torchrun.wait(60) == 1
    assert (tmp_path / "screen").read_text().count("train.py: --beta -1.0: must be 0 or a positive number") == 1
