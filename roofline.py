"""How fast a card could make a run: what decoding reads, what training computes, and the floor of a step."""

import functools

from cards import Card
from shapes import Shape, weights_of


def token_step_bytes(config, shape: Shape, sequences: int, context: float) -> float:
    """Bytes that one decode step reads for so many sequences with `context` tokens each: all weights once, head included,
    the adapter, and each sequence's cache."""
    embedding = 2 * shape.head_parameters * (1 if shape.tied else 2)  # read as the head once; an untied one is looked up in
    weights = weights_of(shape, config.load_in_4bit)[0] - embedding + 2 * shape.head_parameters
    return weights + 2 * shape.lora_parameters(config.lora_r, config.target_modules) + sequences * context * shape.kv_bytes


def ceiling(config, shape: Shape, bandwidth_gbps: float, sequences: int, context: float) -> float:
    """Tokens a second that memory bandwidth allows in decoding (the roofline's slope)."""
    return sequences * bandwidth_gbps * 1e9 / token_step_bytes(config, shape, sequences, context)


def pace(config, shape: Shape, bandwidth_gbps: float | None):
    """The ceiling as a function of sequences and their tokens; None where the card does not tell its bandwidth."""
    return functools.partial(ceiling, config, shape, bandwidth_gbps) if bandwidth_gbps else None


def training_flops(config, shape: Shape) -> float:
    """Floating point operations of one optimizer step's passes over completions of full length.

    Per token and weight 2 forward, 2 for the gradient of the activations, and 2 for each pass more: a recomputation, and the
    log-probs of the reference. The base is frozen, so its weights have no gradient. Attention adds 4 per head dimension and
    pair of tokens, half of which are masked.
    """
    passes = 2 + config.gradient_checkpointing + (config.beta > 0)
    tokens = config.effective_batch * config.max_seq_length
    attention = 2 * shape.layers * shape.heads * shape.head_dim * config.max_seq_length
    dense = 2 * (shape.linear_parameters + shape.head_parameters) + 6 * shape.lora_parameters(config.lora_r)
    return passes * tokens * (dense + attention)


def step_floor(config, shape: Shape, card: Card, kv_tokens: int) -> tuple[float, float | None]:
    """Seconds of one step's decoding and of its training passes at the card's limits; None where its rate is not known."""
    seats = max(kv_tokens // config.max_seq_length, 1)
    waves = -(-config.effective_batch // seats)
    context = config.max_prompt_length + config.max_completion_length / 2
    at_once = min(seats, config.effective_batch)
    decoding = waves * config.max_completion_length * token_step_bytes(config, shape, at_once, context)
    training = training_flops(config, shape) / (card.bf16_tflops * 1e12) if card.bf16_tflops else None
    return decoding / (card.bandwidth_gbps * 1e9), training
