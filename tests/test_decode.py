"""What is changed in vLLM and Unsloth for one run, on tensors and classes that need neither a GPU nor vLLM."""

import ast
import dataclasses
import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import engine
from train import PRESETS

HEIGHTS, WIDTH = (96, 32, 64), 128  # as of q, k and v: other numbers of outputs of the same inputs


@pytest.fixture
def decode():
    return importlib.import_module("decode")  # only now, since it imports torch


@pytest.fixture
def layer():
    """Three matrices as bitsandbytes packs them, with nested scales, behind each other in one tensor, as vLLM has them."""
    import bitsandbytes.functional as quantization
    import torch

    torch.manual_seed(0)
    made = [quantization.quantize_4bit(torch.randn(rows, WIDTH) * (i + 1), compress_statistics=True, quant_type="nf4")
            for i, rows in enumerate(HEIGHTS)]  # fmt: skip
    packed, parts = [weight for weight, _ in made], [state for _, state in made]
    assert all(state.nested for state in parts)

    def unpacked():
        return [quantization.dequantize_4bit(weight, state) for weight, state in zip(packed, parts)]

    weight = torch.nn.Parameter(torch.cat(packed), requires_grad=False)
    return SimpleNamespace(weight=weight, parts=parts, unpacked=unpacked, dequantize=quantization.dequantize_4bit)


def test_joined_matrices_are_what_they_were(decode, layer):
    import torch

    before = layer.unpacked()
    whole = decode.join(layer.parts)
    assert whole.shape == (sum(HEIGHTS), WIDTH) and not whole.nested and whole.absmax.dtype == torch.float32
    assert torch.equal(layer.dequantize(layer.weight, whole), torch.cat(before))
    assert all(torch.equal(now, then) for now, then in zip(layer.unpacked(), before))
    # the training pass's scales are the very ones that decoding reads
    assert whole.absmax.numel() == sum(HEIGHTS) * WIDTH // 64
    storage = whole.absmax.untyped_storage().data_ptr()
    assert all(part.absmax.untyped_storage().data_ptr() == storage for part in layer.parts)
    assert not any(part.nested or part.offset is not None or part.state2 is not None for part in layer.parts)
    # once joined, or plain from the start, they are joined as well
    again = decode.join(layer.parts)
    assert torch.equal(again.absmax, whole.absmax)


def test_one_product_is_that_of_all_parts(decode, layer):
    import torch

    wide = torch.cat(layer.unpacked())
    layer.weight.joined = decode.join(layer.parts)
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(decode.multiply(x, layer.weight), x @ wide.T)


def test_scales_that_two_share_are_measured_once(decode, layer, monkeypatch):
    import torch

    import vram

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    decode.join(layer.parts)
    engines = layer.weight.data
    engines.bnb_quant_state = dict(enumerate(layer.parts))
    weights = sum(HEIGHTS) * WIDTH
    codes = 4 * 16 * len({part.code.data_ptr() for part in layer.parts})
    assert vram.size([engines]) * 2**30 == weights / 2 + 4 * weights / 64 + codes


@pytest.fixture
def vllm(monkeypatch):
    """Modules in vLLM's place, with as much of the classes as is replaced in them."""

    class BitsAndBytesModelLoader:
        def _bind_quant_states_to_params(self, model, stacked_quant_state_dict):
            for name, parameter in model.named_parameters():
                if name in stacked_quant_state_dict:
                    parameter.bnb_quant_state = stacked_quant_state_dict[name]

    class BitsAndBytesLinearMethod:
        def apply(self, layer, x, bias=None):
            return "as vLLM does it"

    names = {
        "vllm.model_executor.layers.quantization.bitsandbytes": {"BitsAndBytesLinearMethod": BitsAndBytesLinearMethod},
        "vllm.model_executor.model_loader.bitsandbytes_loader": {"BitsAndBytesModelLoader": BitsAndBytesModelLoader},
        "vllm.config": {
            "CompilationConfig": lambda **options: options,
            "CompilationMode": SimpleNamespace(NONE="none"),
            "CUDAGraphMode": SimpleNamespace(FULL_DECODE_ONLY="whole"),
        },
    }
    modules = {}
    for path, content in names.items():
        above = None
        for part in path.split("."):
            name = f"{above.__name__}.{part}" if above else part
            module = modules.setdefault(name, ModuleType(name))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
            if above:
                setattr(above, part, module)
            above = module
        vars(above).update(content)
    return SimpleNamespace(loader=BitsAndBytesModelLoader, linear=BitsAndBytesLinearMethod)


def test_layers_are_joined_as_they_are_loaded_and_others_are_left(decode, layer, vllm):
    import torch

    wide = torch.cat(layer.unpacked())
    model = torch.nn.Module()
    model.weight, model.norm = layer.weight, torch.nn.Parameter(torch.ones(3))
    decode.join_4bit_layers()
    vllm.loader()._bind_quant_states_to_params(model, {"weight": dict(enumerate(layer.parts))})
    assert model.weight.joined.shape == (sum(HEIGHTS), WIDTH) and not hasattr(model.norm, "joined")
    x, bias = torch.randn(2, WIDTH), torch.randn(sum(HEIGHTS))
    torch.testing.assert_close(vllm.linear().apply(model, x), x @ wide.T)
    torch.testing.assert_close(vllm.linear().apply(model, x, bias), x @ wide.T + bias)
    assert vllm.linear().apply(SimpleNamespace(weight=model.norm), x) == "as vLLM does it"


def test_vllms_own_class_has_what_is_set():
    file = importlib.metadata.distribution("vllm").locate_file("vllm/config/compilation.py")
    classes = {node.name: node for node in ast.parse(Path(file).read_text()).body if isinstance(node, ast.ClassDef)}
    fields = {node.target.id for node in classes["CompilationConfig"].body if isinstance(node, ast.AnnAssign)}
    assert {"mode", "cudagraph_mode", "cudagraph_capture_sizes"} <= fields
    for name, value in (("CompilationMode", "NONE = 0"), ("CUDAGraphMode", "FULL_DECODE_ONLY = (FULL, NONE)")):
        assert value in map(ast.unparse, classes[name].body)


@pytest.mark.parametrize("lean", [True, False])
def test_vllm_is_set_up_for_the_run_alone_where_that_is_asked_for(decode, vllm, lean, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (14 * 2**30, 16 * 2**30))
    config = dataclasses.replace(PRESETS["qwen3-4b"], lean_decode=lean, gpu_memory_utilization=0.5)
    apply = vllm.linear.apply
    arguments = engine.set_up(config, None, None, SimpleNamespace(total_gib=16.0))
    graphs = {"mode": "none", "cudagraph_mode": "whole", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    assert arguments.get("compilation_config") == (graphs if lean else None)
    assert (vllm.linear.apply is apply) is not lean
    assert arguments["gpu_memory_utilization"] == pytest.approx(8 / 14)
    assert (arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == (64, 2048)


def test_unsloth_is_told_by_the_environment_and_a_users_own_stays(monkeypatch):
    monkeypatch.delenv("UNSLOTH_BLOCK_COMPILE", raising=False)
    assert engine.environment(PRESETS["qwen3-4b"]) == {"UNSLOTH_BLOCK_COMPILE": "0"}
    monkeypatch.setenv("UNSLOTH_BLOCK_COMPILE", "1")
    config = dataclasses.replace(PRESETS["qwen3-4b"], vllm_enable_sleep_mode=True)
    assert engine.environment(config) == {
        "UNSLOTH_BLOCK_COMPILE": "1",
        "UNSLOTH_VLLM_STANDBY": "1",
        "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",  # with them, Unsloth refuses to sleep
    }


def test_torch_takes_one_thread_unless_a_user_says_how_many(monkeypatch):
    import torch

    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    engine.use_one_thread()
    monkeypatch.delenv("OMP_NUM_THREADS")
    engine.use_one_thread()
    assert taken == [1]


# scoring


@pytest.fixture
def trainer():
    """A trainer whose passes return columns from their own longest prompt's end on: a 0 is padding, log-probs are -token."""

    import torch

    def score(model, input_ids, attention_mask, logits_to_keep, batch_size=None, entropy=False, compute_efficient=False):
        asked.append((input_ids.tolist(), attention_mask.tolist(), logits_to_keep, batch_size, args.unsloth_grpo_mini_batch))
        if model == "fails":
            raise RuntimeError("no luck")
        if model == "large" and len(input_ids) > args.unsloth_grpo_mini_batch:  # more than one row in a pass
            raise torch.cuda.OutOfMemoryError("out of memory")
        if compute_efficient:
            return None, None
        prompts = input_ids[:, :-logits_to_keep]
        padding = max(int((row == 0).sum()) for row in prompts)
        return -input_ids[:, -(logits_to_keep + padding) :].float(), "entropies", "auxiliary"

    asked = []
    args = SimpleNamespace(per_device_train_batch_size=2, unsloth_grpo_mini_batch=2)
    return SimpleNamespace(args=args, _get_per_token_logps_and_entropies=score, asked=asked)


def test_a_rollout_is_scored_in_passes_of_the_training_batch(trainer):
    import torch

    import scoring

    ids = torch.tensor([[0, 0, 3, 31, 32], [0, 5, 3, 41, 42], [1, 2, 3, 11, 12], [1, 2, 3, 21, 22], [0, 7, 8, 51, 52]])
    mask = (ids > 0).long()
    scoring.in_training_batches(trainer)
    logps, entropies, auxiliary = trainer._get_per_token_logps_and_entropies("model", ids, mask, 2, batch_size=9)
    assert (entropies, auxiliary) == (None, None)
    # most tokens first, so that Unsloth checks one pass and trusts the others
    assert [rows for rows, *_ in trainer.asked] == [ids[2:4].tolist(), ids[:2].tolist(), ids[4:].tolist()]
    assert [rows for _, rows, *_ in trainer.asked] == [mask[2:4].tolist(), mask[:2].tolist(), mask[4:].tolist()]
    assert [rest for _, _, *rest in trainer.asked] == [[2, 9, 1]] * 3
    # back in the rollout's order: the first pass has the longest padding, 2, and the others are filled up where prompts are
    assert logps.tolist() == [
        [0, -3, -31, -32],
        [-5, -3, -41, -42],
        [0, 0, -11, -12],
        [0, 0, -21, -22],
        [0, -8, -51, -52],
    ]
    assert trainer.args.unsloth_grpo_mini_batch == 2


def test_where_unsloths_loss_scores_by_itself_there_is_nothing_to_put_together(trainer):
    """It asks in each training pass, with compute_efficient as the last argument, and takes the first of what it gets."""
    import torch

    import scoring

    scoring.in_training_batches(trainer)
    ids = torch.ones(2, 3)
    assert trainer._get_per_token_logps_and_entropies("model", ids, ids, 2, None, False, True)[0] is None
    assert trainer.args.unsloth_grpo_mini_batch == 2


def test_the_mini_batch_is_put_back_after_a_failure(trainer):
    import torch

    import scoring

    scoring.in_training_batches(trainer)
    with pytest.raises(RuntimeError, match="no luck"):
        trainer._get_per_token_logps_and_entropies("fails", torch.ones(4, 3), torch.ones(4, 3), 2)
    assert len(trainer.asked) == 1 and trainer.args.unsloth_grpo_mini_batch == 2


def test_a_pass_that_is_too_much_goes_row_by_row(trainer):
    import torch

    import scoring

    scoring.in_training_batches(trainer)
    ids = torch.tensor([[1, 2, 11], [1, 2, 21], [1, 2, 31], [1, 2, 41]])
    logps = trainer._get_per_token_logps_and_entropies("large", ids, (ids > 0).long(), 1)[0]
    assert logps.tolist() == [[-11], [-21], [-31], [-41]]
    assert [passes for *_, passes in trainer.asked] == [1, 2, 1, 2] and trainer.args.unsloth_grpo_mini_batch == 2
