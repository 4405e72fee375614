"""The card, as NVML knows it without torch, and what of it a run and its vLLM engine may take.

Memory is in GiB (2**30 bytes) everywhere. On a machine without an NVIDIA driver every function says so and none fails.
"""

import contextlib
import dataclasses
import math
import os
import sys
import threading

import pynvml

import budget
import models
import shapes
from checks import Refused
from stopping import time_limit

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One visible card."""

    uuid: str
    cuda_name: str  # as CUDA_VISIBLE_DEVICES takes it: an index in PCI order, or a UUID
    name: str
    driver: str
    total_gib: float
    compute_capability: tuple[int, int]

    @property
    def bandwidth_gbps(self) -> float | None:
        """Of its memory, in GB/s, from clock and bus as NVML has them, two transfers a clock; None where it does not tell."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
            clock = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)  # MHz
            return 2 * clock * pynvml.nvmlDeviceGetMemoryBusWidth(handle) / 8 / 1000
        except pynvml.NVMLError:
            return None

    def free_gib(self) -> float:
        """What no process holds, without the driver's reserve."""
        handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).free / GIB

    def used_gib(self) -> float:
        """Memory in use on the whole card, by every process, without the driver's reserve."""
        handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used / GIB


def find_gpu() -> tuple[Gpu | None, str]:
    """The first GPU that CUDA will see, and in words why that one, or why there is none.

    CUDA_VISIBLE_DEVICES is honoured (indices in PCI order, or UUIDs), and so is Unsloth's UNSLOTH_FORCE_CPU=1.
    """
    if os.environ.get("UNSLOTH_FORCE_CPU") == "1":
        return None, "UNSLOTH_FORCE_CPU is 1"
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
        first = "0" if wanted is None else wanted.split(",")[0].strip()
        for i in range(count):
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            if first == str(i) or (first.startswith("GPU-") and uuid.startswith(first)):
                gpu = Gpu(
                    uuid=uuid,
                    cuda_name=first,
                    name=pynvml.nvmlDeviceGetName(handle),
                    driver=pynvml.nvmlSystemGetDriverVersion(),
                    total_gib=pynvml.nvmlDeviceGetMemoryInfo(handle).total / GIB,
                    compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                )
                return gpu, f"{gpu.name} with {gpu.total_gib:.0f} GiB is visible"
    except pynvml.NVMLError as error:
        return None, f"no CUDA GPU is visible ({str(error).lower()})"
    return None, f"no CUDA GPU is visible (CUDA_VISIBLE_DEVICES is {wanted!r}, the machine has {count})"


class PeakMemory(threading.Thread):
    """Samples the card's memory in use every 0.2 s, until `stop`; `peak_gib` is the highest value seen.

    torch's counters miss the CUDA context, libraries and graphs: this one sees all that the card holds.
    """

    def __init__(self, gpu: Gpu):
        super().__init__(daemon=True)
        self.gpu = gpu
        self.start_gib = self.peak_gib = gpu.used_gib()
        self.free_gib = gpu.free_gib()  # at the start, before this process took any
        self.over = threading.Event()
        self.stop = self.over.set
        self.start()

    def run(self):
        try:
            while not self.over.wait(0.2):
                self.peak_gib = max(self.peak_gib, self.gpu.used_gib())
        except pynvml.NVMLError:
            self.peak_gib = math.nan  # no figure is better than a stale one


def memory_plan(config, gpu: Gpu, model: str, free_gib: float) -> tuple[shapes.Shape | None, budget.Plan | None]:
    """The shape of a model folder or hub id, and the budget of a run with it where so much of the card is free.

    Refuses what cannot fit, with the nearest that does; --force lets pass what might. A model that there is no plan for goes
    without, where vLLM's share is given by hand or vLLM is not used.
    """
    try:
        shape = shapes.shape_of(models.shape_source(model, config.load_in_4bit))
    except shapes.NotPlanned as error:
        if config.fast_inference and not config.gpu_memory_utilization:
            by_hand = "give vLLM's share by hand (--gpu-memory-utilization 0.5), or --no-fast-inference"
            raise Refused(f"{error}.\nWithout a plan: {by_hand}") from None
        return None, None
    usable_gib = min(config.vram_limit_gib or math.inf, free_gib)
    found = budget.refusal(config, shape, usable_gib, gpu.total_gib)
    if found and not (config.force and found[1]):
        why, forceable = found
        others = gpu.total_gib - free_gib
        if others > 1 and usable_gib == free_gib:
            why += f"; or end what holds {others:.1f} of the card's {gpu.total_gib:.1f} GiB (nvidia-smi)"
        raise Refused(why + ("; or --force, which starts anyway and may run out of memory" if forceable else ""))
    return shape, budget.plan(config, shape, usable_gib, gpu.total_gib)


def hold_to(limit_gib: float, plan: budget.Plan | None) -> None:
    """Let this process take no more of the card than a limit, CUDA context included.

    torch can cap its own allocator alone, so what the plan expects beside it is taken off the limit (without one, 1 GiB).
    """
    import torch

    total = torch.cuda.mem_get_info()[1]
    beside_torch_gib = plan.beside_torch_gib if plan else 1.0
    torch.cuda.set_per_process_memory_fraction((limit_gib - beside_torch_gib) * GIB / total)


def vllm_arguments(config, plan: budget.Plan | None, gpu: Gpu, free_gib: float) -> dict:
    """What turns Unsloth's loader into a loader with vLLM: its share of the card, and how many sequences it decodes.

    The share is the plan's; Unsloth multiplies it by `free_gib`, what is free on the card, so it is handed over as a share
    of that.
    """
    share_gib = plan.share_gib if plan else config.gpu_memory_utilization * (config.vram_limit_gib or gpu.total_gib)
    return {
        "fast_inference": True,
        "max_lora_rank": config.lora_r,
        "gpu_memory_utilization": min(share_gib / free_gib, 1.0),
        "max_num_seqs": max(16, config.effective_batch),
        "max_num_batched_tokens": max(budget.PREFILL_TOKENS, config.effective_batch),
    }


@contextlib.contextmanager
def bounded_start(console, run, seconds: float):
    """Loading the model with vLLM, 190 s from cold caches on an H200: after `seconds`, the run is closed as FAILED and ends."""

    def give_up():
        text = f"vLLM has not started within {seconds:g} s (--vllm-start-timeout); try again, or --no-fast-inference"
        console.say(f"failed in {console.doing}: {text}")
        console.say(f"where it hangs: {run.run_dir / 'train.log'}")
        run.failure(TimeoutError(text), "")
        run.end("FAILED", console.say)

    with time_limit(seconds, give_up):
        yield


def check_engine(engine, config) -> None:
    """Refuse an engine that Unsloth has cut to shorter sequences, with a print only, since it saw too little room."""
    length = engine.llm_engine.vllm_config.model_config.max_model_len
    if length < config.max_seq_length:
        raise Refused(
            f"vLLM has room for sequences of {length} tokens, and prompt and completion take {config.max_seq_length}: a larger "
            f"--kv-cache-gib (now {config.kv_cache_gib:g}), or a smaller --max-completion-length"
        )


def leave_process_group() -> None:
    """End the process group that vLLM opens, on which torch would otherwise comment at exit."""
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
