"""What the lab leans on inside its libraries, looked for in their source: a release that moves it fails here, without a GPU."""

import ast
import dataclasses
import importlib
import importlib.metadata
import math
from pathlib import Path

import pytest

import budget
import shapes
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
        ("vllm", "config/vllm.py", "range(8, min(max_cudagraph_capture_size + 1, 256), 8)"),  # budget.py, graph_count
        ("vllm", "config/vllm.py", "range(256, max_cudagraph_capture_size + 1, 16)"),
        ("vllm", "v1/worker/gpu_worker.py", "self.peak_activation_memory = "),  # vram.py
        ("vllm", "v1/worker/gpu_model_runner.py", "self.kv_cache_config = kv_cache_config"),
        ("vllm", "v1/kv_cache_interface.py", "\n    kv_cache_tensors: list[KVCacheTensor]"),
        ("vllm", "lora/layers/base_linear.py", "self.lora_a_stacked = tuple("),
        ("vllm", "lora/layers/base_linear.py", "self.lora_b_stacked = tuple("),
        ("vllm", "lora/layers/column_parallel_linear.py", "self.lora_a_stacked = tuple("),
        ("vllm", "lora/layers/logits_processor.py", "self.lora_a_stacked = torch.zeros("),
        ("unsloth_zoo", "fused_losses/fused_linear.py", '_OPS["lp_impl"] = _logprobs_impl'),  # phases.py, attach
        ("unsloth_zoo", "fused_losses/fused_linear.py", '_OPS["lp_bwd_impl"] = _logprobs_bwd_impl'),
        ("unsloth_zoo", "fused_losses/fused_linear.py", '        return _OPS["lp_impl"]('),
        ("unsloth_zoo", "fused_losses/fused_linear.py", "_MIN_LOGITS = 512 * 151936"),  # budget.py, logits_bytes
        ("unsloth_zoo", "fused_losses/fused_linear.py", "_SMALL_CARD_BYTES = 24.5 * 1024**3"),
        ("bitsandbytes", "optim/optimizer.py", "            blocksize = 256\n"),  # budget.py, optimizer_bytes
    ],
)
def test_the_library_is_as_it_was_read(package, file, text):
    assert text in source(package, file)


def source(package, file):
    # by the distribution's files: where it finds no GPU, unsloth hides vllm from the import system
    return Path(importlib.metadata.distribution(package).locate_file(f"{package}/{file}")).read_text()


@pytest.mark.parametrize(
    ("package", "file", "name", "module", "table"),
    [
        ("vllm", "v1/worker/gpu_worker.py", "Worker", "vram", "ENGINE"),
        ("trl", "trainer/grpo_trainer.py", "GRPOTrainer", "phases", "METHODS"),
    ],
)
def test_the_class_has_the_methods_that_are_measured(package, file, name, module, table):
    methods = getattr(importlib.import_module(module), table)  # only now, since they import torch
    (found,) = [node for node in ast.parse(source(package, file)).body if isinstance(node, ast.ClassDef) and node.name == name]
    assert set(methods) <= {node.name for node in found.body if isinstance(node, ast.FunctionDef)}


def test_eight_bit_moments_have_a_scale_for_each_256():
    """The blocks that optimizer_bytes counts, from the state that bitsandbytes makes for a parameter."""
    import bitsandbytes
    import torch

    parameter = torch.nn.Parameter(torch.zeros(64, 160))
    optimizer = bitsandbytes.optim.AdamW8bit([parameter])
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    state = optimizer.state[parameter]
    moments = [tensor for name, tensor in state.items() if name in ("state1", "state2", "absmax1", "absmax2")]
    assert sum(tensor.nbytes for tensor in moments) == budget.optimizer_bytes("adamw_8bit", parameter.numel())[0]


@pytest.mark.parametrize(("hidden", "vocabulary"), [(2560, 151936), (576, 49152), (4096, 32000), (2048, 262144)])
def test_logits_are_planned_in_the_chunks_that_unsloth_makes(hidden, vocabulary):
    """By the library's own function, cut out of its file, for the passes that go through it: fewer than 4,096 rows."""
    tree = ast.parse(source("unsloth_zoo", "fused_losses/fused_linear.py"))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in ("_pow2", "fused_linear_rows")]
    names = {
        "math": math,
        "_MIN_ROWS": 0,
        "_MAX_ROWS": 4096,
        "_MIN_LOGITS": 512 * 151936,
        "_budget_bytes": lambda device: 2**31,
    }
    exec(compile(ast.Module(functions, []), "fused_linear.py", "exec"), names)
    shape = dataclasses.replace(shapes.SHAPES["qwen3-4b"], hidden=hidden, vocabulary=vocabulary)
    for tokens in (8, 500, 512, 1000, 2048, 4095):
        config = dataclasses.replace(PRESETS["qwen3-4b"], per_device_train_batch_size=1, max_completion_length=tokens)
        rows = names["fused_linear_rows"](tokens, hidden, vocabulary)
        assert budget.logits_bytes(config, shape, 139.8)[0] == 4 * rows * vocabulary + 4 * tokens * hidden


def test_a_pass_holds_one_completion_however_large_the_batch(tmp_path):
    """Where Unsloth does not pack: its mini batch is the number of passes, the rows in one are the batch over that."""
    for batch, steps in ((8, 1), (2, 32)):
        config = dataclasses.replace(PRESETS["qwen3-4b"], per_device_train_batch_size=batch, gradient_accumulation_steps=steps)
        arguments = grpo_arguments(config, tmp_path, on_gpu=True)
        rows = arguments["per_device_train_batch_size"] * arguments["steps_per_generation"]
        assert rows / arguments["unsloth_grpo_mini_batch"] == 1
