"""What only a GPU can show. CI has none: run `uv run pytest -m gpu` on a machine with a card."""

import os
import subprocess
import sys

import pytest
from mlflow.tracking import MlflowClient

from conftest import ROOT

pytestmark = pytest.mark.gpu


def test_unsloth_names_its_own_copies():
    """`models.resolve_model` leans on an internal function: it fails here when a new Unsloth moves it."""
    import unsloth  # noqa: F401
    from unsloth.models.loader_utils import get_model_name

    assert get_model_name("unsloth/Qwen3-4B", load_in_4bit=True) == "unsloth/Qwen3-4B-unsloth-bnb-4bit"
    assert get_model_name("unsloth/Qwen3-4B", load_in_4bit=False) == "unsloth/Qwen3-4B"


def test_vllm_samples_from_the_updated_adapter(tmp_path):
    """After 12 steps at a high learning rate the engine's log-probs still agree with the trainer's policy."""
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    command = [sys.executable, str(ROOT / "train.py"), "--preset", "smollm2", "--max-steps", "12", "--learning-rate", "1e-3",
               "--beta", "0.001", "--vllm-importance-sampling-correction", "--vram-limit-gib", "8"]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "MLFLOW_TRACKING_URI": store}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("p7-grpo").experiment_id])
    metrics, params = run.data.metrics, run.data.params
    assert metrics["kl"] > 0.01 and metrics["sampling/sampling_logp_difference/mean"] < 0.1
    assert metrics["vram_peak_gib"] < metrics["vram_peak_nvml_gib"] < 8
    assert int(params["vllm.kv_cache_tokens"]) > 8 * 148 and params["vllm.max_num_seqs"] == "16"
    assert run.info.status == "FINISHED"
