"""What the lab leans on inside its libraries, looked for in their source: a release that moves it fails here, without a GPU."""

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest

from train import PRESETS, grpo_arguments


@pytest.mark.parametrize(
    ("package", "file", "text"),
    [
        ("unsloth", "models/loader_utils.py", "def get_model_name(\n    model_name,\n    load_in_4bit = True,"),  # models.py
        ("unsloth_zoo", "rl_replacements.py", "batch_size = math.ceil(total_samples / B)"),  # train.py, the mini batch
        ("mlflow", "store/db/utils.py", "if attempts < MAX_RETRY_COUNT:"),  # record.py, impatience
        ("vllm", "config/cache.py", "\n    gpu_memory_utilization: float"),  # record.py, engine_figures
        ("vllm", "config/cache.py", "\n    num_gpu_blocks: int | None"),
        ("vllm", "config/cache.py", "\n    block_size: "),
        ("vllm", "config/model.py", "\n    max_model_len: int"),
        ("vllm", "v1/worker/gpu_worker.py", "self.available_kv_cache_memory_bytes = ("),
        ("vllm", "v1/executor/uniproc_executor.py", "self.driver_worker = WorkerWrapperBase("),
        ("vllm", "config/scheduler.py", "\n    max_num_seqs: int"),
        ("vllm", "config/scheduler.py", "\n    max_num_batched_tokens: int"),
    ],
)
def test_the_library_is_as_it_was_read(package, file, text):
    # by the distribution's files: where it finds no GPU, unsloth hides vllm from the import system
    source = importlib.metadata.distribution(package).locate_file(f"{package}/{file}")
    assert text in Path(source).read_text()


def test_a_pass_holds_one_completion_however_large_the_batch(tmp_path):
    """Where Unsloth does not pack: its mini batch is the number of passes, the rows in one are the batch over that."""
    for batch, steps in ((8, 1), (2, 32)):
        config = dataclasses.replace(PRESETS["qwen3-4b"], per_device_train_batch_size=batch, gradient_accumulation_steps=steps)
        arguments = grpo_arguments(config, tmp_path, on_gpu=True)
        rows = arguments["per_device_train_batch_size"] * arguments["steps_per_generation"]
        assert rows / arguments["unsloth_grpo_mini_batch"] == 1
