"""What only a GPU can show. CI has none: run `uv run pytest -m gpu` on a machine with a card."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from conftest import ROOT
from gpu import find_gpu

pytestmark = pytest.mark.gpu


def test_unsloth_names_its_own_copies():
    """`models.resolve_model` leans on an internal function: it fails here when a new Unsloth moves it."""
    import unsloth  # noqa: F401
    from unsloth.models.loader_utils import get_model_name

    assert get_model_name("unsloth/Qwen3-4B", load_in_4bit=True) == "unsloth/Qwen3-4B-unsloth-bnb-4bit"
    assert get_model_name("unsloth/Qwen3-4B", load_in_4bit=False) == "unsloth/Qwen3-4B"


def script(folder, *arguments, **environment):
    """Run train.py with the small model in a folder; returns its exit code and what it showed."""
    command = [sys.executable, str(ROOT / "train.py"), "--preset", "smollm2", *map(str, arguments)]
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}", **environment}
    with open(folder / "screen", "w") as screen:
        done = subprocess.run(command, cwd=folder, stdout=screen, stderr=screen, env=env)
    return done.returncode, (folder / "screen").read_text()


def latest(folder):
    """The record of the last run in a folder."""
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    return client, client.search_runs([client.get_experiment_by_name("p7-grpo").experiment_id])[0]


@pytest.fixture
def empty_card():
    """vLLM takes what other processes allocate while it starts for its own."""
    if find_gpu()[0].used_gib() > 1:
        pytest.skip("other processes use the card")


@pytest.mark.usefixtures("empty_card")
def test_vllm_samples_from_the_updated_adapter(tmp_path):
    """The engine's log-probs agree with the trainer's policy to the last step, while the policy leaves the base model."""
    code, said = script(tmp_path, "--beta", 0.02, "--vllm-importance-sampling-correction", "--vram-limit-gib", 10)
    assert code == 0, said
    assert "destroy_process_group" not in said
    client, run = latest(tmp_path)

    def mean(name, steps):
        return statistics.mean(m.value for m in client.get_metric_history(run.info.run_id, name) if m.step in steps)

    # had vLLM kept the base model, its log-probs would leave the trainer's as the policy leaves the base
    assert mean("kl", range(21, 31)) > 10 * mean("kl", range(1, 6))
    assert mean("sampling/sampling_logp_difference/mean", range(21, 31)) < 0.05
    metrics, params = run.data.metrics, run.data.params
    accuracy = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "held_out/correctness_reward")}
    assert accuracy[30] > accuracy[0] + 0.1 and metrics["adapter_largest_b"] > 1e-4
    assert metrics["vram_peak_gib"] <= metrics["vram_peak_reserved_gib"] < min(10, metrics["vram_peak_nvml_gib"])
    # the plan is of the longest prompts and answers, which these are not
    assert 0.85 < metrics["vram/total_gib"] / metrics["vram_predicted/total_gib"] < 1.08
    for line in ("weights", "lora", "gradients", "optimizer"):
        assert metrics[f"vram/{line}_gib"] == pytest.approx(metrics[f"vram_predicted/{line}_gib"], rel=0.03), line
    assert metrics["vram/kv_cache_gib"] == pytest.approx(1.0, rel=0.08)
    assert 0 < metrics["roofline_share"] < 1 and metrics["seconds/generation"] > 0
    assert int(params["vllm.kv_cache_tokens"]) > 8 * 148 and params["vllm.max_num_seqs"] == "16"
    assert (params["vllm.compilation_mode"], params["vllm.cudagraph_mode"]) == ("NONE", "FULL_DECODE_ONLY")
    assert run.info.status == "FINISHED"


@pytest.mark.usefixtures("empty_card")
@pytest.mark.parametrize(("flag", "cache_bytes"), [("--load-in", 23_040), ("--kv-cache-dtype", 11_520)])
def test_8_bits_take_what_is_planned_and_sample_near_the_trainer(flag, cache_bytes, tmp_path):
    if find_gpu()[0].compute_capability < (9, 0):
        pytest.skip("fp8 is made as it loads from compute capability 9.0 on")
    code, said = script(tmp_path, flag, "fp8", "--vllm-importance-sampling-correction", "--vram-limit-gib", 10,
                        "--max-steps", 8, "--eval-problems", 0)  # fmt: skip
    assert code == 0, said
    client, run = latest(tmp_path)
    metrics = run.data.metrics
    for line in ("weights", "lora", "gradients"):
        assert metrics[f"vram/{line}_gib"] == pytest.approx(metrics[f"vram_predicted/{line}_gib"], rel=0.03), line
    assert int(run.data.params["vllm.kv_cache_tokens"]) == pytest.approx(2**30 / cache_bytes, rel=0.08)
    assert metrics["adapter_largest_b"] > 1e-4
    differences = client.get_metric_history(run.info.run_id, "sampling/sampling_logp_difference/mean")
    assert statistics.mean(m.value for m in differences) < 0.2


@pytest.mark.usefixtures("empty_card")
def test_joined_4_bit_layers_sample_what_the_trainer_scores(tmp_path):
    """Also in the later steps of a rollout, whose answers are an older policy's: clipping is on record."""
    code, said = script(tmp_path, "--load-in", "4bit", "--beta", 0.02, "--vllm-importance-sampling-correction",
                        "--steps-per-generation", 4, "--max-steps", 8, "--eval-problems", 0,
                        "--vram-limit-gib", 10)  # fmt: skip
    assert code == 0 and "2 of 4 of its rollout" in said, said
    client, run = latest(tmp_path)
    history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "sampling/sampling_logp_difference/mean")}
    assert set(history) >= {1, 5} and max(history.values()) < 0.1  # another order of q, k and v would be off by several
    clipped = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "clip_ratio/region_mean")}
    assert set(clipped) == set(range(1, 9)) and max(clipped[1], clipped[5]) < 0.01  # their policy is the one that answered
    metrics = run.data.metrics
    for line in ("weights", "lora", "gradients", "optimizer"):
        assert metrics[f"vram/{line}_gib"] == pytest.approx(metrics[f"vram_predicted/{line}_gib"], rel=0.03), line


@pytest.mark.usefixtures("empty_card")
def test_sigterm_in_the_midst_of_generating_and_going_on(tmp_path):
    """The vLLM engine finishes what it generates; the resumed run samples from the adapter of the checkpoint."""
    task = Path(__file__).with_name("faulty_task.py")
    arguments = ["--task", task, "--max-steps", 12, "--eval-problems", 0, "--vllm-importance-sampling-correction"]
    code, said = script(tmp_path, *arguments, AT="5", DO="generating")
    assert code == 143 and "step  6/12" in said and "step  7/12" not in said, said
    client, first = latest(tmp_path)
    assert first.info.status == "KILLED"
    code, said = script(tmp_path, "--resume-from-checkpoint", "last")
    assert code == 0 and "step  7/12" in said and "step  6/12" not in said, said
    client, second = latest(tmp_path)
    assert second.data.tags["resumed_from_run"] == first.info.run_id and second.info.status == "FINISHED"

    def history(run, name):
        return {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}

    name = "sampling/sampling_logp_difference/mean"
    # an engine that had stayed at the base model would be off by what six steps of 3e-4 have moved
    assert max(history(second, name).values()) < 2 * max(history(first, name).values()) + 0.05
    assert history(second, "reward")[7] > 0


@pytest.mark.usefixtures("empty_card")
def test_memory_that_runs_out_names_phase_holders_and_knobs(tmp_path):
    """128 answers of 1,024 tokens take 3 GiB of KV cache, and the process may have 3 in all."""
    code, said = script(tmp_path, "--backend", "unsloth", "--vram-limit-gib", 3, "--num-generations", 128,
                        "--per-device-train-batch-size", 128, "--max-completion-length", 1024, "--eval-problems", 0,
                        "--temperature", 1.5, "--force")  # fmt: skip
    assert code == 1 and "OutOfMemoryError" in said, said
    assert "out of memory in " in said and "of 3.0 GiB in use" in said and "torch holds " in said, said
    assert "what helps most: --" in said and "(now " in said, said
    assert latest(tmp_path)[1].info.status == "FAILED"


@pytest.mark.usefixtures("empty_card")
def test_a_share_that_is_too_small_is_refused_before_the_engine_starts(tmp_path):
    code, said = script(tmp_path, "--vram-limit-gib", 10, "--gpu-memory-utilization", 0.02)
    assert code == 2, said
    assert "--gpu-memory-utilization 0.02 (0.2 GiB, with weights and all) holds sequences of 0 tokens" in said, said
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.usefixtures("empty_card")
@pytest.mark.parametrize("backend", ["trl", "paged"])
def test_without_unsloth_a_4_bit_model_trains_as_planned(backend, tmp_path):
    """The adapter stays in 32 bits, which TRL by itself gives up, and the first policy is the base model's."""
    code, said = script(tmp_path, "--backend", backend, "--load-in", "4bit", "--gradient-checkpointing", "--beta", 0.02,
                        "--vram-limit-gib", 10, "--max-steps", 3, "--eval-problems", 0)  # fmt: skip
    assert code == 0, said
    client, run = latest(tmp_path)
    saved = load_file(next(tmp_path.glob("outputs/*/final-adapter")) / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    kl = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "kl")}
    assert abs(kl[1]) < 1e-5 < kl[3] and run.data.metrics["adapter_largest_b"] > 1e-4
    metrics = run.data.metrics
    for line in ("weights", "lora", "gradients", "optimizer"):
        assert metrics[f"vram/{line}_gib"] == pytest.approx(metrics[f"vram_predicted/{line}_gib"], rel=0.03), line
    assert 0.8 < metrics["vram/total_gib"] / metrics["vram_predicted/total_gib"] < 1.05


# two cards


@pytest.fixture
def launch(empty_card, tmp_path):
    """Start the small model on two cards; returns torchrun's process. What is left of one in the end is killed."""
    second = find_gpu(1)[0]
    if second is None or second.used_gib() > 1:
        pytest.skip("needs two cards that nobody else uses")
    launchers = []

    def launch(*arguments, **environment):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, str(ROOT / "train.py"), "--preset", "smollm2", "--vram-limit-gib", "10", *map(str, arguments)]
        env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}", **environment}
        with open(tmp_path / "screen", "w") as screen:
            launchers.append(subprocess.Popen(command, cwd=tmp_path, stdout=screen, stderr=screen, env=env))
        return launchers[-1]

    yield launch
    for launcher in launchers:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(60)  # it kills its processes after 30 s


def test_two_cards_train_one_adapter(tmp_path, launch):
    """Each has an engine of its own, which samples from the adapter that both have made, within the planned memory."""
    correction = "--vllm-importance-sampling-correction"  # for the figure that it logs
    launcher = launch("--max-steps", 12, "--eval-problems", 16, "--beta", 0.02, correction)
    assert launcher.wait(400) == 0, (tmp_path / "screen").read_text()
    client, run = latest(tmp_path)
    metrics, params = run.data.metrics, run.data.params
    assert run.info.status == "FINISHED" and params["processes"] == "2" and params["effective_batch"] == "16"
    apart = client.get_metric_history(run.info.run_id, "sampling/sampling_logp_difference/mean")
    assert len(apart) == 12 and max(m.value for m in apart) < 0.05
    assert metrics["kl"] > 1e-3 and metrics["adapter_largest_b"] > 1e-4
    for rank in (0, 1):
        assert metrics[f"process/{rank}/vram_peak_gib"] < 1.05 * metrics["vram_predicted/total_gib"] < 10
        assert metrics[f"process/{rank}/tokens_per_second"] > 0
    assert metrics["process/0/tokens_per_second"] != metrics["process/1/tokens_per_second"]


def test_sigterm_on_two_cards_and_going_on(tmp_path, launch):
    launcher = launch("--max-steps", 200, "--eval-problems", 0)
    deadline = time.monotonic() + 300
    while "step   3/200" not in (said := (tmp_path / "screen").read_text()):
        assert launcher.poll() is None and time.monotonic() < deadline, said
        time.sleep(0.2)
    launcher.terminate()
    launcher.wait(60)
    client, first = latest(tmp_path)
    said = (tmp_path / "screen").read_text()
    assert first.info.status == "KILLED" and said.count("stopped by SIGTERM") == 1, said
    (checkpoint,) = tmp_path.glob("outputs/*/checkpoints/*")
    step = int(checkpoint.name.split("-")[1])
    launcher = launch("--resume-from-checkpoint", "last", "--max-steps", step + 3)
    assert launcher.wait(300) == 0, (tmp_path / "screen").read_text()
    client, second = latest(tmp_path)
    assert second.info.status == "FINISHED" and second.data.tags["resumed_from_run"] == first.info.run_id
    assert [m.step for m in client.get_metric_history(second.info.run_id, "reward")] == [step + 1, step + 2, step + 3]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_takes_the_other_card_down(tmp_path, launch, rank):
    """The other one waits for its rewards within NCCL, which does not notice; it is the one that records the end."""
    task = Path(__file__).with_name("faulty_task.py")
    launcher = launch("--task", task, "--max-steps", 200, "--eval-problems", 0, "--save-steps", 2,
                      AT="6", DO="SIGKILL", ONLY=str(rank))  # fmt: skip
    assert launcher.wait(400) == 1
    said = (tmp_path / "screen").read_text()
    assert f"failed in training, step 6: process {rank} has ended without a word: killed, perhaps for memory" in said, said
    client, run = latest(tmp_path)
    assert run.info.status == "FAILED" and "NOT RECORDED" not in said
    steps = sorted(int(folder.name.split("-")[1]) for folder in tmp_path.glob("outputs/*/checkpoints/*"))
    assert steps == [2, 4] and "/checkpoints/checkpoint-4" in said
