"""Fewer kernels for each 4-bit layer while vLLM decodes. Import it after unsloth.

vLLM has no public place for this. What is replaced was read in vLLM 0.26.0, bitsandbytes 0.50.2 and unsloth 2026.10.9, and is
held by a test.
"""

import functools

import torch
from bitsandbytes import matmul_4bit
from bitsandbytes.functional import QuantState, dequantize_blockwise
from unsloth.kernels.nf4 import dequantize_nf4


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (tokens, inputs) times a packed weight whose parts `join` has joined: (tokens, outputs).

    By bitsandbytes; on Hopper, where that mostly unpacks a layer and multiplies then, with Unsloth's faster unpacking.
    """
    state = weight.joined
    if not (x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9 and state.quant_type == "nf4"):
        return matmul_4bit(x, weight.t(), state)
    dense = dequantize_nf4(weight, state.absmax, None, None, None, state.code, state.blocksize, 256, state.shape, x.dtype)
    return torch.nn.functional.linear(x, dense)


def join(parts: list[QuantState]) -> QuantState:
    """Quantized matrices that lie behind each other in one tensor, as one (rows are outputs), with plain 32-bit scales.

    A scale belongs to 64 weights in a row, so the parts together are a quantized matrix too. The scales of `parts` become
    views of the whole's: whoever uses a part, as Unsloth's training pass does, needs no second copy.
    """
    scales = torch.cat([plain_scales(part) for part in parts])
    for part, own in zip(parts, scales.split([part.absmax.numel() for part in parts])):
        part.absmax, part.nested, part.offset, part.state2 = own, False, None, None
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    return QuantState(scales, torch.Size([rows, first.shape[1]]), first.code, first.blocksize, first.quant_type, first.dtype)


def plain_scales(state: QuantState) -> torch.Tensor:
    """One 32-bit scale for each block of weights, in a row."""
    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    return scales.float().flatten()


def join_4bit_layers() -> None:
    """Let vLLM, when it loads, join the parts of its 4-bit layers, and multiply by each layer once.

    As it is, q, k and v (gate and up) lie in one tensor but are multiplied one by one, each result is copied to its place,
    and Unsloth keeps the scales nested, which takes two more kernels each time.
    """
    from vllm.model_executor.layers.quantization.bitsandbytes import BitsAndBytesLinearMethod
    from vllm.model_executor.model_loader.bitsandbytes_loader import BitsAndBytesModelLoader

    bind, apply = BitsAndBytesModelLoader._bind_quant_states_to_params, BitsAndBytesLinearMethod.apply

    @functools.wraps(bind)
    def bind_and_join(self, model, states):
        bind(self, model, states)
        for parameter in model.parameters():
            if isinstance(parts := getattr(parameter, "bnb_quant_state", None), dict):
                parameter.joined = join([parts[i] for i in range(len(parts))])

    @functools.wraps(apply)
    def apply_joined(self, layer, x, bias=None):
        if not hasattr(layer.weight, "joined"):
            return apply(self, layer, x, bias)
        out = multiply(x.to(layer.weight.joined.dtype), layer.weight).to(x.dtype)
        return out if bias is None else out + bias

    BitsAndBytesModelLoader._bind_quant_states_to_params = bind_and_join
    BitsAndBytesLinearMethod.apply = apply_joined
