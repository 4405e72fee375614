"""What only a GPU can show. CI has none: run `uv run pytest -m gpu` on a machine with a card."""

import os
import statistics
import subprocess
import sys

import pytest
from mlflow.tracking import MlflowClient

from conftest import ROOT
from gpu import find_gpu

pytestmark = pytest.mark.gpu


def test_unsloth_names_its_own_copies():
    """`models.resolve_model` leans on an internal function: it fails here when a new Unsloth moves it."""
    import unsloth  # noqa: F401
    from unsloth.models.loader_utils import get_model_name

    assert get_model_name("unsloth/Qwen3-4B", load_in_4bit=True) == "unsloth/Qwen3-4B-unsloth-bnb-4bit"
    assert get_model_name("unsloth/Qwen3-4B", load_in_4bit=False) == "unsloth/Qwen3-4B"


@pytest.fixture
def empty_card():
    """vLLM takes what other processes allocate while it starts for its own."""
    if find_gpu()[0].used_gib() > 1:
        pytest.skip("other processes use the card")


@pytest.mark.usefixtures("empty_card")
def test_vllm_samples_from_the_updated_adapter(tmp_path):
    """The engine's log-probs agree with the trainer's policy to the last step, while the policy leaves the base model."""
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    command = [sys.executable, str(ROOT / "train.py"), "--preset", "smollm2", "--beta", "0.02",
               "--vllm-importance-sampling-correction", "--vram-limit-gib", "10"]  # fmt: skip
    with open(tmp_path / "screen", "w") as screen:
        env = {**os.environ, "MLFLOW_TRACKING_URI": store}
        done = subprocess.run(command, cwd=tmp_path, stdout=screen, stderr=screen, env=env)
    said = (tmp_path / "screen").read_text()
    assert done.returncode == 0, said
    assert "destroy_process_group" not in said
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("p7-grpo").experiment_id])

    def mean(name, steps):
        return statistics.mean(m.value for m in client.get_metric_history(run.info.run_id, name) if m.step in steps)

    # had vLLM kept the base model, its log-probs would leave the trainer's as the policy leaves the base
    assert mean("kl", range(21, 31)) > 10 * mean("kl", range(1, 6))
    assert mean("sampling/sampling_logp_difference/mean", range(21, 31)) < 0.05
    metrics, params = run.data.metrics, run.data.params
    accuracy = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "held_out/correctness_reward")}
    assert accuracy[30] > accuracy[0] + 0.1 and metrics["adapter_largest_b"] > 1e-4
    assert metrics["vram_peak_gib"] <= metrics["vram_peak_reserved_gib"] < min(10, metrics["vram_peak_nvml_gib"])
    assert int(params["vllm.kv_cache_tokens"]) > 8 * 148 and params["vllm.max_num_seqs"] == "16"
    assert run.info.status == "FINISHED"
