"""How fast a card could make a run: what decoding reads, what training computes, and the floor of a step."""

import functools

from cards import Card
from shapes import Shape, weights_of


def token_step_bytes(config, shape: Shape, sequences: int, context: float) -> float:
    """Bytes that one decode step reads for so many sequences with `context` tokens each: all weights once, head included,
    the adapter, and each sequence's cache."""
    embedding = 2 * shape.head_parameters * (1 if shape.tied else 2)  # read as the head once; an untied one is looked up in
    plain_scales = config.fast_inference and config.lean_decode
    weights = weights_of(shape, config.load_in, plain_scales)[0] - embedding + 2 * shape.head_parameters
    cache = sequences * context * shape.kv_bytes(config.kv_cache_dtype)
    return weights + 2 * shape.lora_parameters(config.lora_r, config.target_modules) + cache


def ceiling(config, shape: Shape, bandwidth_gbps: float, sequences: int, context: float) -> float:
    """Tokens a second that memory bandwidth allows in decoding (the roofline's slope)."""
    return sequences * bandwidth_gbps * 1e9 / token_step_bytes(config, shape, sequences, context)


def pace(config, shape: Shape | None, gpu):
    """The ceiling as a function of sequences and their tokens; None without a shape, and without a gpu.Gpu's bandwidth."""
    bandwidth_gbps = gpu.bandwidth_gbps if gpu and shape else None
    return functools.partial(ceiling, config, shape, bandwidth_gbps) if bandwidth_gbps else None


def training_flops(config, shape: Shape) -> float:
    """Floating point operations of one optimizer step's passes over completions of full length.

    Per weight and token 2 forward, 2 more where checkpointing runs it again, and 2 for the gradient of the activations; the
    base is frozen, so only the adapter's weights have a gradient of their own. The head scores completions alone, and is
    always run again. Attention takes 2 x 2 per pair of tokens and width, half of them masked, and as much twice backward.
    Scoring under the reference (beta), or under the policy that sampled, is one forward pass more for each rollout.
    """
    tokens = config.effective_batch * config.max_seq_length
    scored = config.effective_batch * config.max_completion_length
    attention = 2 * tokens * shape.layers * shape.heads * shape.head_dim * config.max_seq_length
    again = config.gradient_checkpointing
    dense = 2 * tokens * shape.linear_parameters * (2 + again) + 2 * scored * shape.head_parameters * 3
    adapter = tokens * shape.lora_parameters(config.lora_r, config.target_modules) * (2 * (2 + again) + 2)
    scorings = (config.beta > 0) + (config.steps_per_rollout > 1 or config.vllm_importance_sampling_correction)
    scoring = 2 * tokens * shape.linear_parameters + 2 * scored * shape.head_parameters + attention
    return dense + adapter + attention * (3 + again) + scorings * scoring / config.num_iterations


def step_floor(config, shape: Shape, card: Card, kv_tokens: int) -> tuple[float, float | None]:
    """Seconds of one step's decoding and of its training passes at the card's limits; None where its rate is not known.

    For answers of full length, as many at once as the cache takes; a rollout serves steps_per_rollout steps.
    """
    length = config.max_prompt_length + config.max_completion_length / 2
    read = config.rollout_batch * config.max_completion_length * length  # token positions, over all token steps
    steps = max(config.max_completion_length, read / max(kv_tokens, 1))
    size = steps * token_step_bytes(config, shape, 0, 0) + read * shape.kv_bytes(config.kv_cache_dtype)
    training = training_flops(config, shape) / (card.bf16_tflops * 1e12) if card.bf16_tflops else None
    return size / (card.bandwidth_gbps * 1e9) / config.steps_per_rollout, training
