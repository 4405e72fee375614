"""Where memory ran out, who holds it, and the knobs that help most, with values.

The texts are those of torch 2.11, vLLM 0.26.0, unsloth_zoo 2026.10.9 and transformers 5.17; tests look for vLLM's there.
Memory is in GiB (2**30 bytes) everywhere.
"""

import dataclasses
import errno
import math
import re
import resource
import sys
import traceback

from adapter import disk_trouble
from checks import Refused, flag, one_line
from models import EMBEDDED

GIB = 2**30
# CUDA context, libraries and graphs: 1.4 beside torch's tensors on an H200 (README.md); what goes far beyond is another's
OWN_GIB = 3
# one token in a KV cache: Qwen3-4B takes 0.14 MiB, and models of up to 32 B parameters with grouped heads half of this
MIB_PER_TOKEN = 0.5
# what vLLM's share should leave: 1.1 for context, libraries and graphs, 2.5 for a training pass like the chapter's
KEPT_GIB = 3.6

# vllm/v1/core/kv_cache_utils.py, vllm/v1/worker/utils.py and gpu_worker.py. Unsloth tries again with 0.85 of the share, and
# raises what the second attempt said, as a RuntimeError (unsloth_zoo/vllm_utils.py, load_vllm)
NO_CACHE = r"No available memory for the cache blocks"
SHORT_CACHE = (
    r"To serve at least one request with the model's max seq len \((\d+)\), \(([\d.]+) GiB KV cache is needed, "
    r"which is larger than the available KV cache memory \(([\d.]+) GiB\)"
)
NOT_FREE = (
    r"Free memory on device \S+ \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU memory utilization "
    r"\([\d.e-]+, ([\d.]+) GiB\)"
)
RACE = r"Error in memory profiling"
# CUDA's allocator, driver and cuBLAS; the CPU's allocator; transformers, where a 4-bit model does not fit beside others
OTHER = r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|can(no|')t allocate memory|enough GPU RAM"

# functions in the traceback of a training step, under plain TRL and Unsloth alike: the first line that is all there counts
PHASES = (
    ("generation", {"_generate_single_turn"}),
    ("the reward functions", {"_calculate_rewards"}),
    ("the log-prob pass", {"_generate_and_score_completions", "_get_per_token_logps_and_entropies"}),
    ("the forward pass", {"compute_loss"}),
    ("the backward pass", {"training_step", "backward"}),
    ("the optimizer step", {"_run_epoch", "_clip_grad_norm"}),
    ("the optimizer step", {"_run_epoch", "step"}),
)
# what helps, best first, by a word of the phase. Unsloth packs a batch into one pass and, where that is too much, takes one
# completion at a time: so only the backward pass, which has no second try, gains much from a smaller batch
ORDER = {
    "loading": "cache four_bit no_vllm model",
    "evaluation": "problems shorter four_bit model",
    "generation": "answers shorter four_bit model",
    "reward": "",
    "log-prob": "cache shorter no_reference four_bit",
    "forward": "checkpointing cache batch shorter four_bit model",
    "optimizer": "cache optimizer four_bit model",
    "": "checkpointing batch cache shorter four_bit model",
}
OTHERS_OUT = "end what else runs on the card (nvidia-smi lists it)"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Who holds the card, in GiB."""

    total_gib: float  # the card's
    card_used_gib: float  # in use now, by every process (NVML)
    others_gib: float  # in use before this process began
    torch_gib: float  # torch's tensors: weights, LoRA, and vLLM's KV cache, since vLLM runs in this process
    torch_reserved_gib: float  # what torch holds of the card for them
    kv_cache_gib: float  # vLLM's, or 0

    @property
    def rest_gib(self) -> float:
        """CUDA context, libraries, graphs, and what other processes have taken since this one began."""
        return max(self.card_used_gib - self.others_gib - self.torch_reserved_gib, 0)

    @property
    def others_now_gib(self) -> float:
        """What other processes hold: what they held at first, and what no context, library or graph explains."""
        return self.others_gib + max(self.rest_gib - OWN_GIB, 0)


def measure(gpu, peak, kv_cache_gib: float = 0, sleeps: bool = False) -> Memory | None:
    """Who holds the card now; `gpu` is gpu.Gpu, `peak` gpu.PeakMemory. Never raises: None without a card or a figure.

    `sleeps`: vLLM's cache may be in torch's counters and not on the card. It is where torch's blocks and a CUDA context, which
    takes 0.7 GiB, are more than there is.
    """
    try:
        cuda = sys.modules["torch"].cuda
        tensors, reserved = cuda.memory_allocated() / GIB, cuda.memory_reserved() / GIB
        used = gpu.used_gib()
        if sleeps and reserved + 0.6 > used - peak.start_gib:
            tensors, reserved, kv_cache_gib = tensors - kv_cache_gib, reserved - kv_cache_gib, 0.0
        return Memory(gpu.total_gib, used, peak.start_gib, tensors, reserved, kv_cache_gib)
    except Exception:  # after a CUDA error anything may fail
        return None


def what_failed(error: BaseException, config, doing: str, memory: Memory | None) -> str:
    """Any failure in one line, and where memory or the disk ran out what helps on the next ones."""
    lines = [one_line(error) if isinstance(error, Refused) else f"{type(error).__name__}: {one_line(error)}"]
    if about_memory := explain(error, config, doing, memory):
        lines.append(about_memory)
    elif disk_trouble(error):
        lines.append(f"--output-dir {config.output_dir}: make room there, or add a folder on another disk to the command below")
    return "\n".join(lines)


def explain(error: BaseException, config, phase: str, memory: Memory | None) -> str | None:
    """What ran out where, who holds it, and at most three knobs, on one to three lines; None for any other error.

    `phase` is what the script was doing; in a training step the traceback says more. `config` is train.Config.
    """
    found = next((e for e in chain(error) if is_about_memory(e)), None)
    if found is None:
        return None
    text = " ".join(str(found).split())
    exact = phase_of(error)
    where = f"{exact} ({phase})" if exact else phase
    wanted = asked_for(text)
    if refusal := vllm_refusal(text, config, memory):
        first, advice = f"vLLM cannot start: {refusal[0]}", refusal[1]
    elif is_ram(found, text):
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        first, memory = f"out of RAM in {where}: {held:.1f} GiB held at the peak{wanted}", None
        advice = knobs(config, order(config, exact or phase, False), None, False)
    else:
        first = f"out of memory in {where}{in_use(config, memory)}{wanted}"
        advice = knobs(config, order(config, exact or phase, True), memory)
        if memory and memory.total_gib - memory.card_used_gib < 1 and memory.others_now_gib > 0.5:
            advice = [OTHERS_OUT, *advice]
    advice = "; ".join(in_words(change, config) for change in advice[:3])
    return "\n".join(filter(None, [first, holders(memory), f"what helps most: {advice}" if advice else ""]))


def chain(error: BaseException) -> list[BaseException]:
    """An error, and those it was raised from or while handling: Unsloth raises vLLM's again as its own."""
    errors = [error]
    for e in errors:
        errors += [earlier for earlier in (e.__cause__, e.__context__) if earlier is not None and earlier not in errors]
    return errors


def is_about_memory(error: BaseException) -> bool:
    """By its class, of which torch's is known by name since torch may not be there, or by its text."""
    if isinstance(error, MemoryError) or "OutOfMemoryError" in [c.__name__ for c in type(error).__mro__]:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    texts = "|".join((NO_CACHE, SHORT_CACHE, NOT_FREE, RACE, OTHER))
    text = " ".join(str(error).split())
    return isinstance(error, (RuntimeError, ValueError, AssertionError)) and bool(re.search(texts, text, re.IGNORECASE))


def is_ram(error: BaseException, text: str) -> bool:
    """Whether the machine's memory ran out, not the card's; Unsloth raises a MemoryError about the GPU too."""
    return isinstance(error, (MemoryError, OSError)) and "GPU" not in text or "allocate memory" in text


def asked_for(text: str) -> str:
    """What was asked for in vain, where torch says it: in bytes of RAM, or in KiB, MiB or GiB of the card."""
    asked = re.search(r"[Tt]ried to allocate ([\d.]+) ([bKMG])", text)
    return f", {float(asked[1]) * 1024 ** ('bKMG'.index(asked[2]) - 3):.2g} GiB more asked for" if asked else ""


def phase_of(error: BaseException) -> str | None:
    """The part of a training step that raised, by the functions in its traceback; None outside of one."""
    names = {frame.f_code.co_name for e in chain(error) for frame, _ in traceback.walk_tb(e.__traceback__)}
    return next((phase for phase, functions in PHASES if functions <= names), None)


def vllm_refusal(text: str, config, memory: Memory | None) -> tuple[str, list] | None:
    """Why vLLM gave up before it allocated its cache, and what helps; None for any other text."""
    less = knobs(config, "four_bit no_vllm model", None)
    if re.search(RACE, text):
        return "another process gave memory back while vLLM measured the card", ["start again", OTHERS_OUT]
    if found := re.search(NOT_FREE, text):
        free, total, wanted = map(float, found.groups())
        numbers = f"vLLM wants {wanted:g} GiB of the card's {total:g}, and {free:g} are free"
        smaller = resized(config, free - wanted - 0.3, memory)
        if wanted < total - 1:
            return f"others fill the card: {numbers}", [OTHERS_OUT, *smaller, *less]
        return f"its share is too large: {numbers}", [*smaller, *less]
    if found := re.search(SHORT_CACHE, text):
        tokens, needed, left = map(float, found.groups())
        fits = min(int(tokens * left / needed) - config.max_prompt_length, config.max_completion_length - 1)
        shorter = [{"max_completion_length": fits}] if fits > 0 else []
        seen = f"{tokens:g} tokens take {needed:g} GiB of KV cache, and weights and graphs leave {left:g}"
        return f"its share is too small: {seen}", [*resized(config, needed - left + 0.1, memory), *shorter, *less]
    if re.search(NO_CACHE, text):
        if memory and memory.rest_gib > OWN_GIB:
            return "other processes took memory while vLLM measured the card, which counts it as its own", [OTHERS_OUT]
        seen = "its share is too small: weights and graphs take all of it, and leave nothing for the KV cache"
        return seen, [*resized(config, config.kv_cache_gib, memory), *less]
    return None


def resized(config, change_gib: float, memory: Memory | None) -> list[dict]:
    """vLLM's memory made larger or smaller, by the knob that sets it; empty where the result could not work."""
    if config.gpu_memory_utilization is None:
        cache = math.ceil(round(100 * (config.kv_cache_gib + change_gib), 6)) / 100
        return [{"kv_cache_gib": cache}] if cache >= sequence_gib(config) else []
    card_gib = config.vram_limit_gib or (memory.total_gib if memory else None)
    follow = [{"gpu_memory_utilization": None}] if change_gib > 0 else []  # the share then follows from kv_cache_gib
    if card_gib is None:
        return follow
    share = 100 * (config.gpu_memory_utilization + change_gib / card_gib)
    share = (math.ceil(share) if change_gib > 0 else math.floor(share)) / 100
    return [{"gpu_memory_utilization": share}, *follow] if 0 < share <= 1 - KEPT_GIB / card_gib else follow


def sequence_gib(config) -> float:
    """GiB of KV cache that one sequence of full length takes at most; vLLM starts with no less."""
    return config.max_seq_length * MIB_PER_TOKEN / 1024


def order(config, phase: str, on_card: bool) -> str:
    """Names of what helps in a phase. What vLLM generates lies in its cache, which is as large whatever is asked of it."""
    if on_card and config.fast_inference and ("generation" in phase or "evaluation" in phase):
        phase = "loading"
    if not on_card and "log-prob" in phase:  # a CPU takes the whole batch in one pass
        phase = "forward"
    return next(names for word, names in ORDER.items() if word in phase)


def knobs(config, names: str, memory: Memory | None, on_card: bool = True) -> list[dict]:
    """At most three changes of the config, best first, each to be tried by itself; a larger limit, where one is set, last."""
    batch, steps, passes = config.per_device_train_batch_size, config.gradient_accumulation_steps, config.steps_per_generation
    part = next((n for n in range(2, batch + 1) if batch % n == 0), 1)
    vllm, limit = on_card and config.fast_inference, config.vram_limit_gib
    about_vllm = {"gpu_memory_utilization": None, "vllm_importance_sampling_correction": False, "kv_cache_dtype": "auto"}
    about_vllm |= {"load_in": "4bit"} if config.load_in == "fp8" else {}
    changes = {
        "cache": vllm and smaller_cache(config, memory),
        "no_vllm": vllm and {"backend": "unsloth", **{k: v for k, v in about_vllm.items() if getattr(config, k) != v}},
        "four_bit": on_card and config.load_in != "4bit" and {"load_in": "4bit"},
        "model": config.model != EMBEDDED and {"model": None},
        "checkpointing": not config.gradient_checkpointing and {"gradient_checkpointing": True},
        "batch": part > 1
        and {
            "per_device_train_batch_size": batch // part,
            "gradient_accumulation_steps": steps * part,
            **({"steps_per_generation": passes * part} if passes else {}),
        },
        "shorter": config.max_completion_length > 1 and {"max_completion_length": config.max_completion_length // 2},
        "answers": fewer_answers(config),
        "problems": config.eval_problems > 1 and {"eval_problems": min(config.eval_problems, 64) // 2},  # 64 at a time
        "no_reference": config.beta and {"beta": 0.0},
        "optimizer": on_card and config.optim.startswith("adamw_torch") and {"optim": "adamw_8bit"},
    }
    best = [changes[name] for name in names.split() if changes[name]][:3]
    if memory and limit and memory.total_gib - memory.others_now_gib > limit + 0.5:
        larger = min(1.25 * limit, memory.total_gib - memory.others_now_gib)
        best = [*best[:2], {"vram_limit_gib": math.floor(10 * larger) / 10}]
    return best


def smaller_cache(config, memory: Memory | None) -> dict | None:
    """Half of vLLM's KV cache, or what one sequence takes: fewer sequences run at once, and nothing else changes."""
    cache = config.kv_cache_gib
    if config.gpu_memory_utilization:
        cache = memory.kv_cache_gib if memory else 0
    change = max(-cache / 2, sequence_gib(config) - cache)
    return next(iter(resized(config, change, memory)), None) if change < -cache / 5 else None


def fewer_answers(config) -> dict | None:
    """Half as many completions at once: half the passes of a rollout, half the problems, or a group half as large."""
    steps, passes = config.gradient_accumulation_steps, config.steps_per_generation
    if passes and passes > steps:
        return {"steps_per_generation": max(passes // 2 // steps, 1) * steps}
    group, problems = config.num_generations, config.effective_batch // config.num_generations
    group, problems = (group, problems // 2) if problems > 1 else (max(group // 2, 2), 1)
    count = group * problems
    batch = next(n for n in range(min(config.per_device_train_batch_size, count), 0, -1) if count % n == 0)
    change = {"num_generations": group, "per_device_train_batch_size": batch, "gradient_accumulation_steps": count // batch}
    change |= {"steps_per_generation": passes and count // batch}
    return {name: value for name, value in change.items() if value != getattr(config, name)} or None


def in_words(change: dict | str, config) -> str:
    """A change as flags, each with the value that it has now."""
    if isinstance(change, str):
        return change
    words = []
    for name, value in change.items():
        now = getattr(config, name)
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        elif value is None:
            words.append(f"{'a smaller' if name == 'model' else 'no'} {flag(name)} (now {now})")
        else:
            words.append(f"{flag(name)} {value if isinstance(value, str) else format(value, 'g')} (now {now})")
    return " ".join(words)


def in_use(config, memory: Memory | None) -> str:
    """How full the card is, or the limit."""
    if memory is None:
        return ""
    if config.vram_limit_gib:
        return f": {memory.card_used_gib - memory.others_gib:.1f} of {config.vram_limit_gib:.1f} GiB in use"
    return f": {memory.card_used_gib:.1f} of {memory.total_gib:.1f} GiB in use"


def holders(memory: Memory | None) -> str:
    """Who holds the card."""
    if memory is None:
        return ""
    cache = f" (of them vLLM's KV cache {memory.kv_cache_gib:.1f})" if memory.kv_cache_gib else ""
    spare = memory.torch_reserved_gib - memory.torch_gib
    since = ", with what others took since," if memory.rest_gib > OWN_GIB else ""
    return (
        f"torch holds {memory.torch_gib:.1f} GiB{cache} and {spare:.1f} in reserve, other processes {memory.others_gib:.1f}, "
        f"CUDA context, libraries and graphs{since} {memory.rest_gib:.1f}"
    )
