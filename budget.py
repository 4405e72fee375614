"""Where the memory of a run goes, line by line, before anything loads, and how fast the card could make it.

    uv run python budget.py                                          the qwen3-4b preset on an RTX 5080
    uv run python budget.py --card rtx-4090 --model Qwen/Qwen3-8B --max-completion-length 2048
    uv run python budget.py --vram-gib 11.5 --bandwidth-gbps 504 --model path/to/config.json

Flags are train.py's own, and the card: --card, or --vram-gib and --bandwidth-gbps. No GPU and no heavy library is needed.

Memory is in GiB (2**30 bytes). A line is `computed` where shapes alone decide it, and `estimated` where its coefficients were
fitted to runs on an H200 (README.md, The budget, measured). The lines are those of the chapter *GRPO on 16GB*, on the stack of
uv.lock.
"""

import dataclasses
import math
import os
import sys

from cards import CARDS, Card
from checks import Refused, check_config, check_limit, check_precision, flag
from roofline import ceiling, step_floor, token_step_bytes, training_flops
from shapes import SHAPES, Shape, shape_of, weights_of

GIB = 2**30
PREFILL_TOKENS = 2048  # what vLLM takes in one prefill pass, and profiles itself with
EVALUATED_AT_ONCE = 64  # problems that an evaluation without vLLM answers at once
PAGED_BLOCK = 16  # tokens in a block of continuous batching's cache
MARGIN = 0.03  # of the card: what is suggested leaves as much, since the plan has been off by so much

# Bytes fitted to the runs in README.md (The budget, measured): H200, driver 580.159.04, the stack of uv.lock.
CONTEXT = round(0.807 * GIB)  # 0.67 when CUDA starts, and kernels and libraries as they load
VLLM_ITSELF = 82 * 2**20  # in its share beside what has a line: 72 MiB outside of torch, 10 for rope tables
GRAPHS_BESIDE_TORCH = round(0.13 * GIB)
SLACK = round(0.05 * GIB)
SLACK_WITH_CHECKPOINTING = round(0.19 * GIB)
SLACK_WITH_SLEEP = 0.33  # of the activations, beside that: torch's blocks without expandable segments, fitted to one run
UNSLOTHS_OWN = 70 * 2**20
GENERATE_COPIES = 3.3  # of generate()'s cache, at its peak: from two runs without vLLM, 1.16 GiB for Qwen3-4B's 0.35
# Without Unsloth (trl, paged): fitted to two runs, of SmolLM2 without checkpointing and of Qwen3-4B's shape with it
PLAIN_GENERATE_COPIES = 1.5
PLAIN_BLOCKS = 2.5  # times the bytes in a block: norms in 32 bits, and an input of its own for each LoRA layer
PLAIN_OTHER = 20 * 2**20
PAGED_GRAPHS = round(0.25 * GIB)  # the pool of paged's CUDA graphs, beside what they read
NCCL = round(0.36 * GIB)  # of several processes: kernels, and buffers of 4 channels (parallel.py), between two H200s


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the budget."""

    key: str  # as in the metric vram/<key>_gib
    title: str
    gib: float
    kind: str  # computed or estimated
    formula: str
    counted_gib: float  # what it adds to the peak: less, where others are gone by the time that it comes

    @property
    def label(self) -> str:
        """The title, in brackets where not all of the line is there at the peak."""
        return self.title if self.counted_gib == self.gib else f"({self.title})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The budget of one config on one card."""

    lines: tuple[Line, ...]
    usable_gib: float
    share_gib: float  # what vLLM is told to take: weights, adapter slots, activations, KV cache; 0 without vLLM
    utilization: float  # the same as a share of the card, or of the limit: gpu_memory_utilization
    beside_torch_gib: float  # what the card holds for the process outside of torch's allocator
    kv_tokens: int
    longest: int  # tokens of the longest sequence that the cache can take, and Unsloth lets vLLM take

    def __getitem__(self, key: str) -> Line:
        return next(line for line in self.lines if line.key == key)

    @property
    def total_gib(self) -> float:
        return sum(line.counted_gib for line in self.lines)

    @property
    def headroom_gib(self) -> float:
        return self.usable_gib - self.total_gib


def plan(config, shape: Shape, usable_gib: float, card_gib: float | None = None) -> Plan:
    """The budget of a train.Config where `usable_gib` of a card with `card_gib` (or as much) may be used."""
    card_gib = card_gib or usable_gib
    share_of_gib = config.vram_limit_gib or card_gib
    vllm = config.fast_inference
    sequences = seats(config)

    # what stays: all sizes are in bytes
    lora = shape.lora_parameters(config.lora_r, config.target_modules)
    plain_scales = vllm and config.lean_decode
    weights, of_weights = weights_of(shape, config.load_in, plain_scales)
    slots = slot_bytes(shape, config.lora_r) if vllm else 0
    state, of_state = optimizer_bytes(config.optim, lora)
    profile = profile_bytes(config, shape) if vllm else 0
    around_cache = weights + slots + profile + VLLM_ITSELF
    kv_bytes = shape.kv_bytes(config.kv_cache_dtype)
    evaluated = min(config.eval_problems, EVALUATED_AT_ONCE)
    if vllm and config.gpu_memory_utilization:
        kv = max(config.gpu_memory_utilization * share_of_gib * GIB - around_cache, 0)
    elif vllm:
        kv = config.kv_cache_gib * GIB
    elif config.backend == "paged":
        kv = (paged_blocks(config) + 2) * PAGED_BLOCK * kv_bytes
    else:
        kv = max(config.rollout_batch, evaluated) * config.max_seq_length * kv_bytes
    kv_tokens = int(kv / kv_bytes) // 16 * 16
    of_kv = f"{kv_tokens:,} tokens of {kv_bytes:,} bytes: {kv_tokens // config.max_seq_length} sequences of full length"
    longest = min(kv_tokens, unsloths_longest(config, shape, around_cache + kv)) if vllm else kv_tokens

    # a training pass. With checkpointing the logits are gone when its backward half is at its peak; without, they come on
    # top of all blocks
    tokens = config.per_device_train_batch_size * config.max_seq_length
    inputs, of_inputs = kept_bytes(config, shape, tokens)
    activations = inputs + (block_bytes(config, shape, tokens) if config.gradient_checkpointing else 0)
    logits, of_logits = logits_bytes(config, shape, card_gib)
    logits_on_top = max(logits - activations, 0) if config.gradient_checkpointing else logits
    training = activations + logits_on_top + 4 * lora
    staging = 2 * tokens * shape.hidden if config.gradient_checkpointing and not config.plain else 0
    other = PLAIN_OTHER if config.plain else UNSLOTHS_OWN + staging
    of_other = "rope tables, small tensors" if config.plain else "Unsloth's staging buffers, rope tables, small tensors"
    if config.backend == "paged":  # a mask between each token of a pass, and each of cache and pass
        at_once = max(256, config.rollout_batch)
        other += 2 * at_once * (paged_blocks(config) * PAGED_BLOCK + at_once)
    slack = SLACK_WITH_CHECKPOINTING if config.gradient_checkpointing else SLACK

    # what generates has given back its tensors when training begins; a cache of vLLM's or of paged blocks stays
    kv_now, kv_kind, context, generating, of_generating = kv, "computed", CONTEXT, 0.0, ""
    if config.vllm_enable_sleep_mode:
        kv_now, of_kv = max(kv + profile - training, 0), f"given back while training: {of_kv}"
        slack += round(SLACK_WITH_SLEEP * activations)
    if config.backend == "paged":  # of each layer, what is read is copied, for all heads; evaluations have generate()'s cache
        reading = 4 * shape.head_dim * (shape.heads + shape.kv_heads) * kv_tokens
        evaluation = PLAIN_GENERATE_COPIES * evaluated * config.max_seq_length * kv_bytes
        generating, of_generating = reading, "keys and values of a layer, copied for all heads"
        if config.use_cuda_graph:  # which keep it, in blocks without a tensor
            slack, generating = slack + PAGED_GRAPHS + reading, 0.0
            context += 120_000 * shape.layers * paged_graphs(config)
        if evaluation > generating:
            generating, of_generating = (
                evaluation,
                f"generate()'s cache, with copies, for {evaluated} problems of an evaluation",
            )
    elif not vllm:
        kv, kv_kind = (PLAIN_GENERATE_COPIES if config.plain else GENERATE_COPIES) * kv, "estimated"
        kv_now, of_kv = max(kv - training, 0), f"generate()'s, with copies, also in evaluations: {of_kv}"

    of_context = "with libraries and kernels, as on an H200"
    if config.processes > 1:
        context, of_context = context + NCCL, f"{of_context}, and NCCL's {NCCL / GIB:.2f}"

    def line(key, title, size, kind, formula, counted=None):
        return Line(key, title, size / GIB, kind, formula, (size if counted is None else counted) / GIB)

    lines = (
        line("weights", "base weights", weights, "computed", of_weights),
        line("context", "CUDA context", context, "estimated", of_context),
        line("lora", "LoRA adapter", 4 * lora + slots, "computed",
             f"{lora:,} parameters in 32 bits" + (", vLLM's slot in 16" if vllm else "")),
        line("gradients", "its gradients", 4 * lora, "computed", "as many, in 32 bits"),
        line("optimizer", "optimizer state", state, "computed", of_state),
        line("kv_cache", "KV cache", kv, kv_kind, of_kv, kv_now),
        line("generation", "generating", generating, "estimated", of_generating, max(generating - training, 0)),
        line("activations", "activations", activations, "estimated", f"{of_inputs}, {tokens:,} tokens in one pass"),
        line("logits", "logits chunk", logits, "estimated", of_logits, logits_on_top),
        line("vllm_activations", "vLLM's activations", profile, "estimated",
             f"{PREFILL_TOKENS:,} tokens in prefill, {sequences} sampled, while nothing trains",
             0 if config.vllm_enable_sleep_mode else max(profile - training, 0)),
        line("vllm_graphs", "vLLM's CUDA graphs", graph_bytes(config, shape) if vllm else 0, "estimated",
             f"{graph_count(config)} graphs and their pool"),
        line("slack", "allocator slack", slack, "estimated", "torch's blocks that no tensor fills"),
        line("other", "all else", other, "estimated", of_other),
    )  # fmt: skip
    share = (around_cache + kv) / GIB if vllm else 0.0
    beside_torch = (context + (GRAPHS_BESIDE_TORCH if vllm else 0)) / GIB
    return Plan(lines, usable_gib, share, share / share_of_gib, beside_torch, kv_tokens, longest)


def seats(config) -> int:
    """Sequences that vLLM is set up to decode at once (max_num_seqs).

    Not 256, which is Unsloth's word for as many as it sees fit: 96 of a share of 37 GiB (unsloth_zoo 2026.10.9, vllm_utils.py).
    """
    most = max(16, config.rollout_batch)
    return most + (most == 256)


def paged_blocks(config) -> int:
    """Blocks of the cache of continuous batching (paged.py): room for a whole rollout, and one more block for each sequence."""
    return config.rollout_batch * (math.ceil(config.max_seq_length / PAGED_BLOCK) + 1)


def paged_graphs(config) -> int:
    """CUDA graphs for decoding with continuous batching: one for each 8 sequences and each eighth of the cache (paged.py)."""
    eighths = min(math.ceil(paged_blocks(config) * PAGED_BLOCK / 256), 8)
    return math.ceil(config.rollout_batch / 8) * eighths


def unsloths_longest(config, shape: Shape, share: float) -> int:
    """Tokens to which Unsloth cuts vLLM's sequences, by its own estimate of what a share (bytes) leaves for the cache.

    unsloth_zoo 2026.10.9, vllm_utils.py, approximate_vllm_memory_usage: 5 bits for a weight in 4, 10 for a weight or a cache's
    element in 8 (engine.py has it count fp8 so), at least 0.15 GiB for graphs, whole 256 tokens.
    """
    kind = shape.on_card(config.load_in)
    quantized = 0 if kind == "16bit" else shape.linear_parameters - shape.kept_parameters()
    weights = quantized * (5 / 8 if kind == "4bit" else 10 / 8) + 2 * (shape.parameters - quantized)
    kv_bytes = shape.kv_bytes(config.kv_cache_dtype) * (10 / 8 if config.kv_cache_dtype == "fp8" else 1)
    weights += 2 * shape.lora_parameters(config.lora_r)
    graphs = min(max(172 * 4 * shape.hidden * shape.layers, 0.15 * GIB), GIB)
    return max(int(0.95 * (share - weights - graphs) / kv_bytes), 0) // 256 * 256


def slot_bytes(shape: Shape, r: int) -> int:
    """vLLM's own copy of an adapter: room for all projections in 16 bits, and for embedding, head and logits."""
    ends = (3 if shape.qk_norms else 2) * (shape.vocabulary + shape.hidden)
    return 2 * (shape.lora_parameters(r) + r * ends)


def optimizer_bytes(optim: str, parameters: int) -> tuple[int, str]:
    """Bytes of the optimizer's state for so many 32-bit parameters, and in words what it is."""
    if optim.endswith("adamw_8bit"):
        paged = ", which may move to RAM" if optim.startswith("paged") else ""
        return 2 * (parameters + parameters // 256 * 4), f"two moments in 8 bits, a scale for each 256{paged}"
    if optim.startswith("adamw"):
        return 8 * parameters, "two moments in 32 bits"
    return 0, "a row and a column for each matrix: next to nothing" if optim == "adafactor" else "none"


def kept_bytes(config, shape: Shape, tokens: int) -> tuple[int, str]:
    """Bytes of `tokens` tokens, packed into one row, that stand in 16 bits until the backward pass is through.

    With checkpointing that is each block's input. Unsloth moves those to RAM in the forward pass, but by the end of the
    backward pass as much is on the card again. Without Unsloth they stay there, and rows are padded to the longest.
    """
    if config.gradient_checkpointing:
        return 2 * tokens * shape.layers * shape.hidden, f"{shape.layers} blocks' inputs and one block"
    if config.plain:
        return shape.layers * block_bytes(config, shape, tokens), f"{shape.layers} blocks whole"
    attention = 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return 2 * tokens * shape.layers * (2 * shape.hidden + attention + 3 * shape.intermediate), f"{shape.layers} blocks whole"


def block_bytes(config, shape: Shape, tokens: int) -> int:
    """Bytes at work in one block's backward pass: three tensors as wide as the MLP, four as wide as the stream.

    Without Unsloth several times as much.
    """
    return round((PLAIN_BLOCKS if config.plain else 1) * 2 * tokens * (3 * shape.intermediate + 4 * shape.hidden))


def logits_bytes(config, shape: Shape, card_gib: float) -> tuple[int, str]:
    """Bytes of the buffer in which logits are made, a part at a time, and of the hidden states around it.

    By the rules of unsloth_zoo 2026.10.9, fused_losses/fused_linear.py: tiles of at most 256 MiB on cards up to 24.5 GiB and
    from 4,096 tokens on, chunks of at least 512 rows of Qwen3's vocabulary else. A limit does not make a card small. Without
    Unsloth by those of TRL 1.15.0, kernels/chunked_logprob.py.
    """
    tokens = config.per_device_train_batch_size * config.max_completion_length
    if config.plain:
        rows, columns = min(tokens, 4096), 32768
        return 2 * rows * columns + 4 * tokens * shape.hidden, f"{rows:,} tokens x {columns:,} words in 16 bits"
    small = card_gib <= 24.5
    if small or tokens >= 4096:
        rows = min(4096, tokens)
        columns = max(2**28 // (4 * rows) // 16384, 1) * 16384
        columns = min(columns, 16384 if small else columns, -(-shape.vocabulary // 16384) * 16384)
    else:
        least = min(max(2 ** math.floor(math.log2(512 * 151936 / shape.vocabulary)), 512), 4096)
        rows = 2 ** math.floor(math.log2(max(tokens * shape.hidden / shape.vocabulary, 1)))
        rows, columns = min(max(rows, least), 4096, tokens), shape.vocabulary
    return 4 * rows * columns + 4 * tokens * shape.hidden, f"{rows:,} tokens x {columns:,} words in 32 bits"


def profile_bytes(config, shape: Shape) -> int:
    """Bytes at the peak of vLLM's profiling run: a block in prefill, logits and what the sampler makes of them, and workspace.

    With lean_decode the two come one after the other: 0.20 GiB for 64 sequences and for 128.
    """
    logits = seats(config) * shape.vocabulary
    if config.lean_decode:
        return max(2 * PREFILL_TOKENS * (3 * shape.intermediate + 4 * shape.hidden), 8 * logits) + 50 * 2**20
    return 2 * PREFILL_TOKENS * (3 * shape.intermediate + 2 * shape.hidden) + 20 * logits + 50 * 2**20


def graph_sizes(config) -> list[int]:
    """Numbers of sequences that vLLM captures a graph for under lean_decode: a rollout thins out as its answers end."""
    most = seats(config)
    return [size for size in (1, 2, 4, 8, 16, *range(32, most, 32)) if size < most] + [most]


def graph_count(config) -> int:
    """CUDA graphs that vLLM captures, each with LoRA and without. By itself, in pieces up to twice the seats, and whole."""
    if config.lean_decode:
        return 2 * len(graph_sizes(config))
    sizes, most = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)], seats(config)
    return 2 * sum((size <= 2 * most) + (size <= most) for size in sizes)


def graph_bytes(config, shape: Shape) -> int:
    """Bytes of the graphs: about 120 kB for each block in each, and their pool.

    The pool holds 824 bytes for each unit of width and depth, and in 4-bit one block's MLP unpacked (with lean_decode, from
    one run, gate and up twice), in 16-bit cuBLAS's workspace. 8-bit was not measured: it counts as 16.
    """
    in_4_bits = shape.on_card(config.load_in) == "4bit"
    launches = (148_000 if in_4_bits else 118_000) * graph_count(config) * shape.layers
    matrices = 5 if config.lean_decode else 3
    work = 2 * matrices * shape.hidden * shape.intermediate if in_4_bits else 64 * 2**20
    return launches + work + 824 * shape.hidden * shape.layers + 12 * 2**20


def full_finetuning(config, shape: Shape) -> tuple[float, str]:
    """GiB of training all parameters as the chapter has it, without cache and activations, and in words what they are."""
    p, logits = shape.parameters, 4 * config.per_device_train_batch_size * config.max_completion_length * shape.vocabulary
    parts = {"weights and gradients in 16 bits": 4 * p, "32-bit weights and two moments": 12 * p}
    if config.beta:
        parts["a reference model in 16 bits"] = 2 * p
    parts["all logits at once"] = logits
    return sum(parts.values()) / GIB, ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())


def refusal(config, shape: Shape, usable_gib: float, card_gib: float, capability=None) -> tuple[str, bool] | None:
    """Why a config cannot run, with the nearest that can, on one or two lines, and whether it could be tried all the same.

    None where the plan fits. 8 bits are offered where the card's compute capability is known and has them.
    """
    found = plan(config, shape, usable_gib, card_gib)
    short = config.fast_inference and found.longest < config.max_seq_length
    beyond = config.max_seq_length > shape.context
    if found.headroom_gib >= 0 and not short and not beyond:
        return None
    changes = [in_words(change, config) for change in nearest(config, shape, usable_gib, card_gib, capability)]
    nearest_ones = f"Nearest that fits, one at a time: {'; '.join(changes) or 'none, but a smaller --model'}"
    if beyond:
        lengths = f"--max-prompt-length {config.max_prompt_length} and --max-completion-length {config.max_completion_length}"
        return f"{lengths} are more than the {shape.context} tokens that {shape.name} can take.\n{nearest_ones}", False
    if short:
        asked = f"--kv-cache-gib {plain(config.kv_cache_gib)}"
        if config.gpu_memory_utilization:
            share_gib = config.gpu_memory_utilization * (config.vram_limit_gib or card_gib)
            asked = f"--gpu-memory-utilization {config.gpu_memory_utilization:g} ({share_gib:.1f} GiB, with weights and all)"
        why = f"{asked} holds sequences of {found.longest} tokens, and prompt and completion take {config.max_seq_length}."
        return f"{why}\n{nearest_ones}", False
    largest = max(found.lines, key=lambda line: line.counted_gib)
    why = (
        f"the plan takes {found.total_gib:.1f} GiB and {usable_gib:.1f} may be used; the largest line is {largest.title}, "
        f"{largest.counted_gib:.1f}."
    )
    return f"{why}\n{nearest_ones}", True


def works(config, shape: Shape, usable_gib: float, card_gib: float | None = None) -> bool:
    """Whether a config can be suggested: allowed, with a margin, and with room for one sequence in vLLM's cache."""
    try:
        check_config(config)
    except Refused:
        return False
    found = plan(config, shape, usable_gib, card_gib)
    longest = min(found.longest, shape.context) if config.fast_inference else shape.context
    return config.max_seq_length <= longest and found.headroom_gib >= MARGIN * usable_gib


def nearest(config, shape: Shape, usable_gib: float, card_gib: float | None = None, capability=None) -> list[dict]:
    """Changes of the config, each of which works by itself: cache or evaluation, batch, length, group, precision."""

    def fits(change: dict) -> bool:
        return works(dataclasses.replace(config, **change), shape, usable_gib, card_gib)

    def has_8_bits(change: dict) -> bool:
        try:
            check_precision(dataclasses.replace(config, **change), shape, "", capability)
        except Refused:
            return False
        return capability is not None

    changes = []
    if config.fast_inference and not config.gpu_memory_utilization:
        cache = {"kv_cache_gib": nearest_cache(config, shape, usable_gib, card_gib)}
        changes += [cache] if fits(cache) else []
    elif config.fast_inference:  # its share is given by hand
        shares = sorted(range(1, 100), key=lambda n: abs(n / 100 - config.gpu_memory_utilization))
        changes += [change for n in shares if fits(change := {"gpu_memory_utilization": n / 100})][:1]
    else:
        problems = largest_that(lambda n: fits({"eval_problems": n}), 1, min(config.eval_problems, EVALUATED_AT_ONCE) - 1)
        changes += [{"eval_problems": problems}] if problems else []
    batch, steps, passes = config.per_device_train_batch_size, config.gradient_accumulation_steps, config.steps_per_generation
    smaller = [{"per_device_train_batch_size": batch // n, "gradient_accumulation_steps": steps * n,
                "steps_per_generation": passes and passes * n} for n in range(2, batch + 1) if batch % n == 0]  # fmt: skip
    changes += [change for change in smaller if fits(change)][:1]
    if passes:
        most = min(passes // steps - 1, config.max_steps // config.num_iterations)
        fewer = largest_that(lambda n: fits(rollout_of(config, n * steps)), 1, most)
        changes += [rollout_of(config, fewer * steps)] if fewer else []
    length = largest_that(lambda n: fits({"max_completion_length": n}), 1, config.max_completion_length - 1)
    changes += [{"max_completion_length": length}] if length else []
    group = largest_that(lambda n: fits(group_of(config, n)), 2, config.num_generations - 1)
    changes += [group_of(config, group)] if group else []
    caches = [{"kv_cache_dtype": "fp8"}]  # for more tokens, or for as many in half of it
    if not config.gpu_memory_utilization:
        caches += [{"kv_cache_dtype": "fp8", "kv_cache_gib": math.ceil(50 * config.kv_cache_gib) / 100}]
    simple = [change for change in caches if config.kv_cache_dtype == "auto" and has_8_bits(change)]
    if shape.quantized is None:
        simple += [{"load_in": "fp8"}] * (config.load_in == "16bit" and has_8_bits({"load_in": "fp8"}))
        simple += [{"load_in": "4bit"}] * (config.load_in != "4bit")
    simple += [{"gradient_checkpointing": True}] * (not config.gradient_checkpointing)
    return changes + [change for change in simple if fits(change)]


def nearest_cache(config, shape: Shape, usable_gib: float, card_gib: float | None = None) -> float:
    """The size of vLLM's cache (GiB, in hundredths) that is nearest to the config's and neither too large nor too small."""

    def planned(n: int) -> Plan:
        return plan(dataclasses.replace(config, kv_cache_gib=n / 100), shape, usable_gib, card_gib)

    now = round(100 * config.kv_cache_gib)
    if plan(config, shape, usable_gib, card_gib).longest < config.max_seq_length:
        return ((largest_that(lambda n: planned(n).longest < config.max_seq_length, max(now, 1), 10**5) or 0) + 1) / 100
    return (largest_that(lambda n: planned(n).headroom_gib >= MARGIN * usable_gib, 1, now - 1) or 0) / 100


def room_for(config, shape: Shape, usable_gib: float, card_gib: float | None = None) -> list[dict]:
    """What the room that is left buys, each by itself: the largest group, completion length and rollout that work.

    With a larger cache where the present one lets all completions of a rollout decode at once, and would not any more. A
    longer rollout (steps_per_generation) is one whose answers the run uses up; its cache lets it decode at once, since only
    that is faster, unless vLLM's share is given by hand.
    """

    kv_bytes = shape.kv_bytes(config.kv_cache_dtype)

    def cache_for_all(config) -> float:
        return math.ceil(100 * config.rollout_batch * config.max_seq_length * kv_bytes / GIB) / 100

    can_grow = config.fast_inference and not config.gpu_memory_utilization
    at_once = can_grow and cache_for_all(config) <= config.kv_cache_gib

    def with_cache(change: dict) -> dict:
        needed = cache_for_all(dataclasses.replace(config, **change))
        grows = at_once or can_grow and [*change] == ["steps_per_generation"]
        return {**change, "kv_cache_gib": needed} if grows and needed > config.kv_cache_gib else change

    def largest(change_of, values) -> list[dict]:
        def fits(i: int) -> bool:
            return works(dataclasses.replace(config, **with_cache(change_of(values[i]))), shape, usable_gib, card_gib)

        found = largest_that(fits, 0, len(values) - 1)
        return [] if found is None else [with_cache(change_of(values[found]))]

    group, steps, passes = config.num_generations, config.gradient_accumulation_steps, config.steps_per_generation
    unit = group // math.gcd(group, config.per_device_train_batch_size)  # of steps, for whole groups
    if passes:  # as many rollouts as the run uses up
        whole = config.max_steps // config.num_iterations
        used_up = [n for n in range(passes // steps + 1, whole + 1) if config.max_steps % (n * config.num_iterations) == 0]
        rollouts = largest(lambda n: {"steps_per_generation": n * steps}, used_up)
    else:
        rollouts = largest(lambda n: {"gradient_accumulation_steps": n * unit}, range(steps // unit + 1, 1025))
    return [
        *largest(lambda n: group_of(config, n), range(group + 1, 1025)),
        *largest(lambda n: {"max_completion_length": n}, range(config.max_completion_length + 1, 2**20 + 1)),
        *rollouts,
    ]


def rollout_of(config, passes: int) -> dict:
    """A rollout of so many passes; without vLLM, evaluations answer no more at once."""
    at_once = passes * config.per_device_train_batch_size
    fewer = {} if config.fast_inference else {"eval_problems": min(config.eval_problems, at_once)}
    return {"steps_per_generation": passes, **fewer}


def group_of(config, size: int) -> dict:
    """Another group size, for as many problems in a step; a pass holds whole groups, also where it held a part of one."""
    problems = max(config.per_device_train_batch_size // config.num_generations, 1)
    change = {"num_generations": size, "per_device_train_batch_size": size * problems}
    steps = max(config.effective_batch // config.num_generations // problems, 1)
    if steps == config.gradient_accumulation_steps:
        return change
    passes = config.steps_per_generation and config.steps_per_generation // config.gradient_accumulation_steps * steps
    return {**change, "gradient_accumulation_steps": steps, "steps_per_generation": passes}


def largest_that(fits, low: int, high: int) -> int | None:
    """The largest whole number in low..high that fits, where all below one that fits do too; None where none does."""
    if high < low or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def in_words(change: dict, config) -> str:
    """A change as flags, each with the value that it has now."""
    flags = [
        flag(name) if value is True else f"{flag(name)} {plain(value)} (now {plain(getattr(config, name))})"
        for name, value in change.items()
        if value != getattr(config, name)
    ]
    return " ".join(flags)


def plain(value) -> str:
    """A number as text, a whole one with all its digits."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(plan_: Plan) -> list[str]:
    """The plan as lines of text: what is not there at the peak stands in brackets."""
    rows = []
    for line in plan_.lines:
        if line.gib:
            size = f"{line.gib:.2f}" if line.counted_gib == line.gib else f"({line.gib:.2f})"
            about = "" if line.kind == "computed" else "~"
            rows.append(f"{line.title:20} {about + size:>8}  {line.formula}")
    return [*rows, f"{'total':20} {plan_.total_gib:8.2f}  of {plan_.usable_gib:.2f} GiB: {plan_.headroom_gib:.2f} left"]


def answer(config, shape: Shape, card: Card) -> tuple[str, bool]:
    """All that budget.py says of a config on a card, or on one for each process, and whether it fits."""
    usable_gib = config.vram_limit_gib or card.vram_gib
    p = plan(config, shape, usable_gib, card.vram_gib)
    why = refusal(config, shape, usable_gib, card.vram_gib, card.compute_capability)
    bits = shape.on_card(config.load_in).replace("bit", "-bit")
    full, parts = full_finetuning(config, shape)
    plain_4bit = bits == "4-bit" and shape in SHAPES.values()
    lines = [
        f"{shape.name} ({bits}) on {card.name}: {card.vram_gib:g} GiB, {card.bandwidth_gbps:g} GB/s; "
        f"{config.effective_batch} completions a step in groups of {config.num_generations}, of up to "
        f"{config.max_completion_length} tokens, {config.rollout_batch} generated at once",
        "GiB (~ estimated; in brackets: not there at the peak, or not all of it)",
        *table(p),
        f"full fine-tuning, before cache and activations: {full:.0f} GiB",
        f"({parts})",
    ]
    if plain_4bit:
        lines.append("(Unsloth's own 4-bit copies keep some layers in 16 bits: the config.json of one says which)")
    lines.append("")
    if why:
        return "\n".join([*lines, f"does not fit: {why[0]}"]), False
    buys = [in_words(change, config) for change in room_for(config, shape, usable_gib, card.vram_gib)]
    if p.headroom_gib < MARGIN * usable_gib:
        lines.append(f"fits, barely: the plan has been off by {MARGIN:.0%}, and a screen or another process takes memory too")
    else:
        lines.append(f"fits. The headroom buys, one at a time: {'; '.join(buys) or 'nothing more'}")
    if config.fast_inference:
        lines.append(f"vLLM's share: gpu_memory_utilization {p.utilization:.3f} ({p.share_gib:.2f} GiB)")
    context = config.max_prompt_length + config.max_completion_length / 2
    speeds = [f"{n}: {ceiling(config, shape, card.bandwidth_gbps, n, context):,.0f}" for n in (1, 8, 64)]
    read = token_step_bytes(config, shape, 1, context)
    decoding, training = step_floor(config, shape, card, p.kv_tokens)
    of_training = f"{training_flops(config, shape) / 1e12:.0f} TFLOP of training passes"
    if training:
        of_training += f", {training:.1f} s at {card.bf16_tflops:g} TFLOP/s"
    else:
        of_training += ", for which the card's rate is not known"
    lines += [
        f"decoding reads {read / 1e9:.2f} GB a token step, with 16-bit head, adapter and {context:.0f} tokens of cache:",
        f"at most {', '.join(speeds)} tokens/s (sequences: rate)",
        f"a step of answers of full length takes at least {decoding + (training or 0):.1f} s: {decoding:.1f} s of decoding, "
        f"{of_training}",
    ]
    if (n := config.processes) > 1:
        exchanged = 4 * shape.lora_parameters(config.lora_r, config.target_modules)
        lines.append(
            f"{n} processes, a card for each: this on each, {n * p.total_gib:.1f} GiB in all; "
            f"{n * config.effective_batch} completions a step, for which each card sends and takes "
            f"{2 * (n - 1) / n * exchanged / 1e9:.2f} GB of gradients"
        )
    return "\n".join(lines), True


def main(arguments: list[str]) -> int:
    """The command line; returns 0 where the plan fits, 1 where it does not. Raises Refused for what cannot be planned."""
    import command_line
    from train import PRESETS, Config

    @dataclasses.dataclass(frozen=True)
    class Question(Config):
        """The memory and the speed of a run, before it starts. Flags are train.py's, and the card's."""

        card: str | None = None
        """A card that is built in (an unknown name lists them); rtx-5080 without any."""
        vram_gib: float | None = None
        """GiB of the card that CUDA reports, instead of --card's."""
        bandwidth_gbps: float | None = None
        """GB/s of the card's memory, instead of --card's."""
        processes: int = 1
        """Cards of this kind, with a process on each."""

    presets = {name: Question(**vars(preset)) for name, preset in PRESETS.items()}
    question = command_line.parse(Question, presets, arguments, gpu=True, program="budget.py")
    for name in ("vram_gib", "bandwidth_gbps"):
        value = getattr(question, name)
        if value is not None and not 0 < value < 1e5:
            raise Refused(f"{flag(name)} {value:g}: must be above 0, and below 100000")
    if not 1 <= question.processes <= 1024:
        raise Refused(f"--processes {question.processes}: must be at least 1, and at most 1024")
    name = (question.card or "rtx-5080").lower()
    if name not in CARDS:
        raise Refused(f"--card {question.card}: built in are {', '.join(CARDS)}; others by --vram-gib and --bandwidth-gbps")
    card = CARDS[name]
    given = [value is not None for value in (question.card, question.vram_gib, question.bandwidth_gbps)]
    if given not in ([False, False, False], [True, False, False], [False, True, True]):
        raise Refused("--vram-gib and --bandwidth-gbps describe one card together: give both, or --card alone")
    if question.vram_gib:
        card = Card("your card", question.vram_gib, question.bandwidth_gbps)
    check_config(question)
    check_limit(question, card.vram_gib)
    shape = shape_of(question.model)
    check_precision(question, shape, card.name, card.compute_capability)
    text, fits = answer(question, shape, card)
    print(text, flush=True)
    return 0 if fits else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refused:
        print(f"budget.py: {refused}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(2)
    except OSError as error:  # a full disk
        print(f"budget.py: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(2)
