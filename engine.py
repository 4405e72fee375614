"""How much of the card a run may take, and vLLM's engine within it: planned, started in time, looked at, and ended."""

import contextlib
import math
import os
import sys

import budget
import models
import shapes
from checks import Refused, check_precision
from gpu import GIB, Gpu
from stopping import time_limit


def memory_plan(config, gpu: Gpu, model: str, free_gib: float) -> tuple[shapes.Shape | None, budget.Plan | None]:
    """The shape of a model folder or hub id, and the budget of a run with it where so much of the card is free.

    Refuses what cannot fit, with the nearest that does; --force lets pass what might. A model that there is no plan for goes
    without, where vLLM's share is given by hand or vLLM is not used.
    """
    try:
        shape = shapes.shape_of(models.shape_source(model, config.load_in))
    except shapes.NotPlanned as error:
        if config.fast_inference and not config.gpu_memory_utilization:
            by_hand = "give vLLM's share by hand (--gpu-memory-utilization 0.5), or --backend unsloth"
            raise Refused(f"{error}.\nWithout a plan: {by_hand}") from None
        check_precision(config, None, gpu.name, gpu.compute_capability)
        return None, None
    check_precision(config, shape, gpu.name, gpu.compute_capability)
    usable_gib = min(config.vram_limit_gib or math.inf, free_gib)
    found = budget.refusal(config, shape, usable_gib, gpu.total_gib, gpu.compute_capability)
    if found and not (config.force and found[1]):
        why, forceable = found
        others = gpu.total_gib - free_gib
        if others > 1 and usable_gib == free_gib:
            why += f"; or end what holds {others:.1f} of the card's {gpu.total_gib:.1f} GiB (nvidia-smi)"
        raise Refused(why + ("; or --force, which starts anyway and may run out of memory" if forceable else ""))
    return shape, budget.plan(config, shape, usable_gib, gpu.total_gib)


def look_at(config, gpu: Gpu | None) -> budget.Plan | None:
    """The budget of a run, before anything loads; without a GPU there is none. Refuses what cannot fit, or is too long."""
    if gpu:
        return memory_plan(config, gpu, config.model, gpu.free_gib())[1]
    try:
        shape = shapes.shape_of(models.shape_source(config.model, config.load_in))
    except shapes.NotPlanned:
        return None
    if config.max_seq_length > shape.context:
        asked = f"--max-prompt-length {config.max_prompt_length} and --max-completion-length {config.max_completion_length}"
        left = shape.context - config.max_prompt_length
        near = f"--max-completion-length {left}" if left > 0 else f"a --max-prompt-length below {shape.context}"
        raise Refused(f"{asked} are more than the {shape.context} tokens that {shape.name} can take; {near}")
    return None


def hold_to(limit_gib: float, plan: budget.Plan | None) -> None:
    """Let this process take no more of the card than a limit, CUDA context included.

    torch can cap its own allocator alone, so what the plan expects beside it is taken off the limit (without one, 1 GiB).
    """
    import torch

    total = torch.cuda.mem_get_info()[1]
    beside_torch_gib = plan.beside_torch_gib if plan else 1.0
    torch.cuda.set_per_process_memory_fraction((limit_gib - beside_torch_gib) * GIB / total)


def environment(config) -> dict[str, str]:
    """What Unsloth reads from the environment, for a run on a GPU. Set it before unsloth is imported.

    A pass that is not packed runs through decoder layers that Unsloth compiles, 22 seconds of a start. Packed ones do not, and
    ours are packed (scoring.py), but where Unsloth checks one against its rows, or finds that it does not fit: so
    UNSLOTH_BLOCK_COMPILE is off, unless it is set. Sleep mode is taken from the environment, and then vLLM's share from the
    card, unless Unsloth is told to keep the one that it is given.
    """
    found = {"UNSLOTH_BLOCK_COMPILE": os.environ.get("UNSLOTH_BLOCK_COMPILE", "0")}
    if config.vllm_enable_sleep_mode:
        allocator = "expandable_segments:False"  # which vLLM's allocator cannot work beside
        found |= {"UNSLOTH_VLLM_STANDBY": "1", "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1", "PYTORCH_ALLOC_CONF": allocator}
    return found


def use_one_thread() -> None:
    """On a GPU, let torch's own CPU work take one thread, as vLLM does in its processes, unless OMP_NUM_THREADS says more.

    What is left for the CPU is thousands of small tensors, which dozens of threads take longer for than one.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def set_up(config, shape: shapes.Shape | None, plan: budget.Plan | None, gpu: Gpu) -> dict:
    """Change in vLLM what has no argument; returns the arguments that have Unsloth load the model with it."""
    import torch

    arguments = vllm_arguments(config, shape, plan, gpu, free_gib=torch.cuda.mem_get_info()[0] / GIB)
    if config.lean_decode:
        import decode

        decode.join_4bit_layers()
        arguments["compilation_config"] = graphs_alone(budget.graph_sizes(config))
    return arguments


def vllm_arguments(config, shape: shapes.Shape | None, plan: budget.Plan | None, gpu: Gpu, free_gib: float) -> dict:
    """What turns Unsloth's loader into a loader with vLLM: its share of the card, how many sequences it decodes, and 8 bits.

    The share is the plan's; Unsloth multiplies it by `free_gib`, what is free on the card, so it is handed over as a share
    of that.
    """
    sequences = budget.seats(config)
    share_gib = plan.share_gib if plan else config.gpu_memory_utilization * (config.vram_limit_gib or gpu.total_gib)
    return {
        "fast_inference": True,
        "max_lora_rank": config.lora_r,
        "gpu_memory_utilization": min(share_gib / free_gib, 1.0),
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(budget.PREFILL_TOKENS, sequences),
        "float8_kv_cache": config.kv_cache_dtype == "fp8",
        **(quantized_on_loading() if config.load_in == "fp8" and not (shape and shape.quantized) else {}),
    }


def graphs_alone(sizes: list[int]):
    """A vLLM that compiles nothing, and captures CUDA graphs for decoding so many sequences, none of prefill.

    Unsloth has it compile the model, and capture whole graphs and graphs in pieces for dozens of sizes. In a graph, vLLM's own
    kernels decode 64 sequences in 4-bit as fast as compiled ones (docs/pace.md).
    """
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    return CompilationConfig(
        mode=CompilationMode.NONE, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=sizes
    )


def quantized_on_loading() -> dict:
    """What has Unsloth's loader let vLLM quantize a 16-bit checkpoint to 8 bits, a scale a row, for training to share.

    By its exact name: of some models Unsloth would fetch a copy in fp8 with other scales, which the plan is not of. Unsloth
    cuts vLLM's sequences by an estimate that takes these weights for 16 bits: here it is told that they are 8. That is
    internal, read in unsloth_zoo 2026.10.9 (vllm_utils.py), and tests hold it in place.
    """
    import unsloth_zoo.vllm_utils as zoo

    estimate = zoo.vllm_weights_memory_usage
    zoo.vllm_weights_memory_usage = lambda config, load_in_4bit, load_in_8bit: estimate(config, load_in_8bit=True)
    return {"load_in_fp8": True, "use_exact_model_name": True}


@contextlib.contextmanager
def bounded_start(console, run, seconds: float):
    """While the model loads with vLLM: after so many seconds the run is closed as FAILED, and ends."""

    def give_up():
        text = f"vLLM has not started within {seconds:g} s (--vllm-start-timeout); try again, or --backend unsloth"
        console.say(f"failed in {console.doing}: {text}")
        console.say(f"where it hangs: {console.log}")
        run.failure(TimeoutError(text), "")
        run.end("FAILED", console.say)

    with time_limit(seconds, give_up):
        yield


def check(engine, config) -> None:
    """Refuse an engine that Unsloth has cut to shorter sequences, with a print only, since it saw too little room."""
    length = engine.llm_engine.vllm_config.model_config.max_model_len
    if length < config.max_seq_length:
        raise Refused(
            f"vLLM has room for sequences of {length} tokens, and prompt and completion take {config.max_seq_length}: a larger "
            f"--kv-cache-gib (now {config.kv_cache_gib:g}), or a smaller --max-completion-length"
        )


def fewer_seats(engine, config) -> str | None:
    """In words, that vLLM decodes fewer sequences at once than a rollout has, as after Unsloth's second try at a start."""
    seats = engine.llm_engine.vllm_config.scheduler_config.max_num_seqs
    if seats < config.rollout_batch:
        return f"vLLM decodes {seats} sequences at once, a rollout has {config.rollout_batch}: the others wait for their turn"


def leave_process_group() -> None:
    """End the process group that vLLM opens, on which torch would otherwise comment at exit."""
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
