"""What the lab leans on inside its libraries, looked for in their source: a release that moves it fails here, without a GPU."""

import ast
import dataclasses
import importlib
import importlib.metadata
import math
import os
import types
from pathlib import Path

import pytest

import budget
import shapes
from train import PRESETS
from trainer import grpo_arguments

BITSANDBYTES_LOADER = "model_executor/model_loader/bitsandbytes_loader.py"
BITSANDBYTES_LAYER = "model_executor/layers/quantization/bitsandbytes.py"


@pytest.mark.parametrize(
    ("package", "file", "text"),
    [
        ("unsloth", "models/loader_utils.py", "def get_model_name(\n    model_name,\n    load_in_4bit = True,"),  # models.py
        ("unsloth", "models/loader_utils.py", "and torch.cuda.get_device_capability() >= (9, 0)"),  # checks.py, check_precision
        ("unsloth", "models/_utils.py", 'quant_method == "fp8" and major_version * 10 + minor_version < 89:'),
        ("vllm", "v1/attention/backends/triton_attn.py", "current_platform.has_device_capability(89)"),
        ("unsloth", "models/loader.py", "\n        load_in_fp8 = False,  # fp8 LoRA"),  # engine.py, quantized_on_loading
        ("unsloth", "models/loader.py", "\n        use_exact_model_name = False,"),
        ("unsloth_zoo", "vllm_utils.py", "def vllm_weights_memory_usage(config, load_in_4bit = False, load_in_8bit = False):"),
        ("unsloth_zoo", "vllm_utils.py", "weight_bytes = vllm_weights_memory_usage(\n            config, load_in_4bit = "
         "use_bitsandbytes, load_in_8bit = is_fp8,\n"),
        ("unsloth_zoo", "vllm_utils.py", '{"row": "fp8_per_channel", "block": "fp8_per_block"}'),  # shapes.py, weights_of
        ("vllm", "model_executor/layers/quantization/__init__.py", '"fp8_per_channel"'),
        ("vllm", "model_executor/layers/quantization/online/base.py", "        if isinstance(layer, LinearBase):"),
        ("vllm", "_custom_ops.py", "scale = torch.empty((shape[0], 1), device=input.device, dtype=torch.float32)"),
        ("unsloth", "models/loader.py", "\n        float8_kv_cache = False,"),  # engine.py, vllm_arguments
        ("unsloth_zoo", "vllm_utils.py", 'kv_cache_dtype         = "fp8" if float8_kv_cache else "auto",'),
        ("unsloth_zoo", "rl_replacements.py", "batch_size = math.ceil(total_samples / B)"),  # trainer.py, the mini batch
        ("unsloth", "models/rl_replacements.py", "                B = self.args.unsloth_grpo_mini_batch\n"),  # scoring.py
        ("unsloth", "models/rl_replacements.py", "        if compute_efficient:\n"),
        ("unsloth", "models/rl_replacements.py", "_pk_W = logits_to_keep + max_left_pad"),
        ("unsloth", "models/rl_replacements.py", ":, -(logits_to_keep + max_left_pad) :"),
        ("unsloth", "models/rl_replacements.py", "return logprobs.detach(), entropies, aux_loss"),
        ("unsloth_zoo", "rl_replacements.py", "max_left_pad = old_logps.shape[1] - logits_to_keep"),
        ("unsloth_zoo", "rl_replacements.py", "max_left_pad = ref_logps.shape[1] - logits_to_keep"),
        ("vllm", BITSANDBYTES_LOADER, 'set_weight_attrs(param, {"bnb_quant_state": quant_states})'),  # decode.py
        ("vllm", BITSANDBYTES_LOADER, "for seq, quant_state in quant_states.items():"),
        ("vllm", BITSANDBYTES_LAYER, "x, weight[offsets[i] : offsets[i + 1]].t(), quant_states[i]"),
        ("unsloth", "models/loader.py", '\n    "compilation_config",\n'),  # engine.py, graphs_alone
        ("unsloth_zoo", "vllm_utils.py", "        if compilation_config == 3:\n"),
        ("trl", "trainer/grpo_trainer.py", "param.data = param.data.to(torch.bfloat16)"),  # trainer.py, make_ready
        ("trl", "trainer/grpo_trainer.py", "unwrapped_model.to(torch.bfloat16)"),  # paged.py
        ("trl", "trainer/utils.py", "\n_CHUNKED_LOGPROB_CHUNK_SIZE = 32768\n"),  # budget.py, logits_bytes
        ("trl", "kernels/chunked_logprob.py", "\nTOKEN_CHUNK_SIZE = 4096\n"),
        ("trl", "kernels/chunked_logprob.py", "mm_buf = torch.empty((min(N, TOKEN_CHUNK_SIZE), chunk_size), "),
        ("transformers", "integrations/sdpa_paged.py", "repeat_kv(key, module.num_key_value_groups)"),  # budget.py, plan
        ("unsloth_zoo", "vllm_utils.py", "explicit_max_num_seqs = max_num_seqs not in (None, 256)"),  # engine.py
        ("vllm", "config/vllm.py", "self.compilation_config.cudagraph_mode.requires_piecewise_compilation()\n            and "
         "self.compilation_config.mode != CompilationMode.VLLM_COMPILE\n"),
        ("vllm", "config/compilation.py", "\n    cudagraph_specialize_lora: bool = True"),  # budget.py, graph_count
        ("unsloth", "models/_block_compile.py", 'os.environ.get("UNSLOTH_BLOCK_COMPILE", "1") != "0"'),  # engine.py
        ("unsloth", "models/_block_compile.py", '(unsloth_forward and kwargs.get("packed_seq_lengths") is not None)'),
        ("unsloth_zoo", "vllm_utils.py", 'unsloth_vllm_standby or (os.getenv("UNSLOTH_VLLM_STANDBY", "0")'),  # engine.py
        ("unsloth_zoo", "vllm_utils.py", 'standby_util_override = os.getenv("UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE", "0") != "0"'),
        ("unsloth_zoo", "vllm_utils.py", "\n    if unsloth_vllm_standby and not standby_util_override:\n"),
        ("unsloth", "models/rl.py", "args.vllm_enable_sleep_mode=True"),
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
        # decode.py, multiply
        ("unsloth", "kernels/nf4.py", "    code: torch.Tensor,\n    blocksize: int,\n    blocksize2: int,\n    shape,\n"),
        ("bitsandbytes", "optim/optimizer.py", "            blocksize = 256\n"),  # budget.py, optimizer_bytes
        ("accelerate", "accelerator.py", "        if not evaluation_mode:\n"),  # parallel.py, share_gradients
        ("transformers", "trainer.py", 'f"rng_state_{self.args.process_index}.pth"'),  # checkpoints.py
        ("torch", "distributed/elastic/multiprocessing/api.py", "timeout: int = 30) -> None:"),  # stopping.py, PATIENCE
        ("unsloth_zoo", "vllm_utils.py", "def _setup_vllm_external_launcher("),  # parallel.py, join
        ("unsloth_zoo", "vllm_utils.py", "    if not dist.is_initialized():\n"),
        ("vllm", "v1/executor/uniproc_executor.py", 'rank = int(os.environ["RANK"])'),
        ("vllm", "distributed/parallel_state.py", "if not torch.distributed.is_initialized():"),
        ("unsloth", "models/rl.py", "isinstance(model, torch.nn.parallel.DistributedDataParallel)"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("load_in", ["4bit", "fp8", "16bit"])
def test_the_longest_sequence_is_planned_as_unsloth_estimates_it(load_in, kv_cache_dtype):
    """By the library's own functions, cut out of their file; there fp8 is what engine.py has it take for an fp8 checkpoint."""
    tree = ast.parse(source("unsloth_zoo", "vllm_utils.py"))
    wanted = ("approximate_vllm_memory_usage", "_config_get", "_kv_cache_elements_per_token", "_kv_cache_tokens")
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    names = {"os": os, "get_mem_info": lambda: (40 * 2**30, 80 * 2**30)}
    exec(compile(ast.Module(functions, []), "vllm_utils.py", "exec"), names)
    shape = shapes.SHAPES["qwen3-4b"]
    model = types.SimpleNamespace(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate, tie_word_embeddings=True,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=shape.context,
    )  # fmt: skip
    config = dataclasses.replace(PRESETS["qwen3-4b"], load_in=load_in, kv_cache_dtype=kv_cache_dtype)
    for share in (0.2, 0.25, 0.3):
        tokens = names["approximate_vllm_memory_usage"](
            model, load_in_4bit=load_in == "4bit", load_in_8bit=load_in == "fp8", max_seq_length=1024, max_lora_rank=16,
            gpu_memory_utilization=share, float8_kv_cache=kv_cache_dtype == "fp8",
        )[0]  # fmt: skip
        assert abs(budget.unsloths_longest(config, shape, share * 40 * 2**30) - tokens) <= 256


@pytest.mark.parametrize(
    ("method", "owner", "package", "file"),
    [
        ("apply", "BitsAndBytesLinearMethod", "vllm", BITSANDBYTES_LAYER),
        ("_bind_quant_states_to_params", "BitsAndBytesModelLoader", "vllm", BITSANDBYTES_LOADER),
        ("_get_per_token_logps_and_entropies", "GRPOTrainer", "trl", "trainer/grpo_trainer.py"),
    ],
)  # fmt: skip
def test_what_is_replaced_takes_the_arguments_of_what_replaces_it(method, owner, package, file):
    """By name and order, as far as decode.py and scoring.py name them."""
    (found,) = [n for n in ast.parse(source(package, file)).body if isinstance(n, ast.ClassDef) and n.name == owner]
    (function,) = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == method]
    expected = {
        "apply": ["self", "layer", "x", "bias"],
        "_bind_quant_states_to_params": ["self", "model", "stacked_quant_state_dict"],
        "_get_per_token_logps_and_entropies": ["self", "model", "input_ids", "attention_mask"],
    }
    assert [argument.arg for argument in function.args.args][: len(expected[method])] == expected[method]


def test_a_pass_holds_one_completion_however_large_the_rollout(tmp_path):
    """Where Unsloth does not pack: its mini batch is the number of passes, the rows in one are a training batch over that."""
    for batch, steps, passes in ((8, 1, None), (8, 1, 8), (2, 32, None), (4, 2, 16)):
        config = dataclasses.replace(PRESETS["qwen3-4b"], per_device_train_batch_size=batch, gradient_accumulation_steps=steps,
                                     steps_per_generation=passes)  # fmt: skip
        arguments = grpo_arguments(config, tmp_path, on_gpu=True)
        assert arguments["steps_per_generation"] == (passes or steps)
        assert arguments["per_device_train_batch_size"] / arguments["unsloth_grpo_mini_batch"] == 1


def test_a_cold_batch_that_is_not_packed_goes_through_in_one_pass(tmp_path):
    """Log-probs over a temperature of 0.1 differ by more than Unsloth's limit for packing."""
    for temperature, passes in ((1.0, 8), (0.2, 8), (0.1, 1)):
        config = dataclasses.replace(PRESETS["qwen3-4b"], temperature=temperature)
        assert grpo_arguments(config, tmp_path, on_gpu=True)["unsloth_grpo_mini_batch"] == passes


def test_what_unsloths_decode_graphs_leave_is_given_back_once_a_rollout(tmp_path):
    """transformers empties torch's cache where the steps before divide by this: in the step that has generated."""
    config = PRESETS["qwen3-4b"]
    for backend, on_gpu, expected in (
        ("unsloth", True, 8),
        ("unsloth", False, None),
        ("vllm", True, None),
        ("trl", True, None),
    ):
        arguments = grpo_arguments(dataclasses.replace(config, backend=backend), tmp_path, on_gpu=on_gpu)
        assert arguments["torch_empty_cache_steps"] == expected
