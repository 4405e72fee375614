"""Two processes of one run on a CPU: the training of one with the same batch, one record, and ends that leave nothing behind.

Most are forked from a process that has imported the libraries once. What a launcher adds is tried with torchrun and accelerate.
"""

import itertools
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

import parallel
import train as script
from checks import Refused, check_problems, notes
from conftest import ENVIRONMENT, ROOT
from stopping import Stop

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on a CPU: CUDA_VISIBLE_DEVICES= uv run pytest")
TASK = Path(__file__).with_name("faulty_task.py")
BIN = Path(sys.executable).parent


# one process


@pytest.fixture
def environment(monkeypatch):
    def environment(**variables):
        for name in parallel.LAUNCHERS.split():
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return environment


def test_which_process_this_is(environment):
    environment()
    assert parallel.find() == parallel.Team(0, 1)
    environment(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT="29500")
    assert parallel.find() == parallel.Team(1, 2)
    assert not parallel.find().first


def test_a_launcher_with_one_process_is_none(environment):
    environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="none")
    assert parallel.find() == parallel.Team()
    assert not set(parallel.LAUNCHERS.split()) & set(os.environ)


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2 with RANK (none): these are a launcher's, and not all there"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_PORT": "1"}, "WORLD_SIZE 2 with RANK 2"),
        ({"WORLD_SIZE": "two", "RANK": "0", "MASTER_PORT": "1"}, "WORLD_SIZE two with RANK 0"),
        ({"WORLD_SIZE": "4", "RANK": "0", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}, "4 processes, 2 of them here"),
    ],
)
def test_half_a_launcher_is_refused(environment, variables, said):
    environment(**variables)
    with pytest.raises(Refused, match=re.escape(said)):
        parallel.find()


def test_scripts_that_start_runs_take_no_launcher(environment):
    environment(RANK="0", WORLD_SIZE="2", MASTER_PORT="29500")
    for program in ("compare.py", "benchmark.py"):
        with pytest.raises(Refused, match=f"{program} starts its runs itself"):
            parallel.refuse_a_launcher(program)


def test_more_processes_than_cards(monkeypatch):
    cards = {0: "a card", 1: "another"}
    monkeypatch.setattr(parallel, "find_gpu", lambda i: (cards.get(i), ""))
    parallel.check_cards(parallel.Team(0, 2))
    with pytest.raises(Refused, match=r"3 processes and 2 visible cards \(CUDA_VISIBLE_DEVICES\): --nproc-per-node 2"):
        parallel.check_cards(parallel.Team(2, 3))
    cards.clear()
    parallel.check_cards(parallel.Team(2, 3))


def test_what_several_processes_do_is_said_and_needs_problems():
    config = script.PRESETS["smollm2"]
    assert notes(config, 2) == [
        "2 processes: 16 completions a step, 2 problems a rollout, shared out in whole groups; --learning-rate 0.0003 is not "
        "scaled with their number"
    ]
    check_problems(config, 512)
    with pytest.raises(Refused, match="--train-problems 512: one rollout of 513 processes takes 513 problems"):
        check_problems(config, 513)


def test_a_launchers_signal_hurries_nothing_at_first(monkeypatch):
    """It comes because another process has ended; half a minute later the launcher kills."""
    monkeypatch.setattr("stopping.PATIENCE", 0.3)
    given_up = []
    with Stop(launched=True) as stop:
        stop.give_up = lambda: given_up.append("give_up")
        stop.hurry = lambda: given_up.append("hurry")
        stop.leaving = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert not given_up
        time.sleep(0.5)
        assert given_up == ["hurry"]
    with Stop(launched=True) as stop:
        stop.give_up = lambda: given_up.append("give_up")
        with stop.training():
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked == signal.SIGTERM
            time.sleep(0.6)
    assert given_up == ["hurry", "give_up"]


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
        variables["TORCHELASTIC_RESTART_COUNT"] = next(launches)  # all have one parent, by which folders are named
        processes = [
            context.Process(target=run, args=(rank, size, port, folder, arguments, variables, answers)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        for process in processes:
            process.kill()
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
def tiny(tmp_path_factory):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    import models

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(models.embedded_folder())
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **shape)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def flags(tiny):
    return ["--preset", "smollm2", "--model", tiny, "--task", TASK, "--max-steps", 6, "--train-problems", 10,
            "--num-generations", 4, "--per-device-train-batch-size", 4, "--max-completion-length", 8, "--eval-problems", 0,
            "--learning-rate", 1e-2, "--warmup-steps", 0, "--beta", 0.05, "--save-steps", 3, "--sample-steps", 0]  # fmt: skip


def test_two_processes_train_as_one_with_the_same_batch(launch, flags):
    """Same problems, same answers: the losses of six steps and the adapter agree, up to the order of sums."""
    one = launch(*flags, "--gradient-accumulation-steps", 2, size=1, answers=True)
    two = launch(*flags, answers=True)
    assert one.code == [0] and two.code == [0, 0], one.said + two.said
    for done, processes in ((one, "1"), (two, "2")):
        assert {name: done.record.data.params[name] for name in ("processes", "effective_batch", "prompts_per_rollout")} == {
            "processes": processes, "effective_batch": "8", "prompts_per_rollout": "2"}  # fmt: skip
    # TRL deals the answers of one process anew to its passes, so that the KL is a mean of other means
    for name, apart in {"reward": 1e-6, "loss": 1e-4, "grad_norm": 1e-4, "kl": 0.2}.items():
        expected, found = series(one, name), series(two, name)
        assert list(expected) == list(found) == [1, 2, 3, 4, 5, 6]
        assert found == pytest.approx(expected, rel=apart, abs=1e-6), name
    assert len(set(series(two, "loss").values())) > 3
    a, b = (load_file(done.run_dir / "final-adapter" / "adapter_model.safetensors") for done in (one, two))
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-5


@pytest.fixture(scope="module")
def straight(launch, flags):
    """Six steps with sampled answers, and evaluations."""
    return launch(*flags, "--eval-problems", 4, "--eval-steps", 3)


def test_one_record_of_two_processes(straight):
    done = straight
    assert done.code == [0, 0], done.said
    assert [run.info.status for run in done.runs] == ["FINISHED"]
    assert done.said.count("step 6/6") == done.said.count("curves: ") == done.said.count("held-out, after") == 1
    assert not (done.folder / "screen.1").read_text()
    assert "step 6/6" in (done.run_dir / "train.1.log").read_text()
    for rank in (0, 1):
        assert len(series(done, f"process/{rank}/tokens_per_second")) == 6
        assert min(series(done, f"process/{rank}/rss_peak_gib").values()) > 0.1
    assert list(series(done, "held_out/letters_reward")) == [0, 3, 6]
    assert {file.name for file in (done.run_dir / "checkpoints" / "checkpoint-6").glob("rng*")} == {
        "rng_state_0.pth", "rng_state_1.pth"}  # fmt: skip


def test_groups_are_whole_and_no_two_processes_have_the_same(straight):
    for file in sorted((straight.run_dir / "completions").glob("*.parquet")):
        table = pandas.read_parquet(file)
        assert table["prompt"].map(str).value_counts().tolist() == [4, 4]
        assert table["completion"].map(str).nunique() == 8


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
    assert failure.read_text().startswith(told)


def test_a_process_that_is_killed(launch, flags):
    done = launch(*flags, AT=5, DO="SIGKILL", ONLY=1)
    assert done.code == [1, -signal.SIGKILL]
    assert "failed in training, step 5: process 1 is gone without a word" in done.said
    assert done.record.info.status == "FAILED" and (done.run_dir / "final-adapter" / "adapter_model.safetensors").is_file()


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
    assert done.said.count("SIGTERM: stopping once this step is done") == done.said.count("stopped by SIGTERM") == 1
    assert done.record.info.status == "KILLED"
    last = int(re.findall(r"step +(\d+)/10000", done.said)[-1])
    there = f"outputs/{done.run_dir.name}/checkpoints/checkpoint-{last}"
    assert f"--nproc-per-node 2 {ROOT / 'train.py'} --resume-from-checkpoint {there}" in done.said


def test_a_refusal_is_said_once(tmp_path, flags):
    torchrun = start(tmp_path, BIN / "torchrun", "--standalone", "--nproc-per-node", 2, ROOT / "train.py", *flags, "--beta", -1)
    assert torchrun.wait(60) == 1
    assert (tmp_path / "screen").read_text().count("train.py: --beta -1.0: must be 0 or a positive number") == 1
