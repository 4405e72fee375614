"""What NVML knows of the card, without importing torch: which GPU is visible, its driver, and its memory in use.

Memory is in GiB (2**30 bytes) everywhere. On a machine without an NVIDIA driver every function says so and none fails.
"""

import contextlib
import dataclasses
import math
import os
import sys
import threading

import pynvml

from checks import Refused, flag
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
        self.over = threading.Event()
        self.stop = self.over.set
        self.start()

    def run(self):
        try:
            while not self.over.wait(0.2):
                self.peak_gib = max(self.peak_gib, self.gpu.used_gib())
        except pynvml.NVMLError:
            self.peak_gib = math.nan  # no figure is better than a stale one


def make_room(limit_gib: float | None, gpu: Gpu, start_gib: float) -> float:
    """GiB that torch and vLLM may take: what is free on the card, or with a limit what is left of that, and no more.

    torch can cap its own allocator alone. So the CUDA context, measured here against `start_gib` (what the card held
    before), and 0.5 GiB for the libraries and graphs that load later are taken off the limit first.
    """
    import torch

    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    if limit_gib is None:
        return free / GIB
    room = max(limit_gib - (gpu.used_gib() - start_gib) - 0.5, 0)
    torch.cuda.set_per_process_memory_fraction(room * GIB / total)
    return min(room, free / GIB)


def engine_gib(model: str, load_in_4bit: bool, lora_r: int) -> tuple[float, float]:
    """GiB that vLLM needs for a model folder or hub id beside its KV cache, and GiB of that cache for one token.

    The former is weights, adapter, and 0.7 more: the peak activation (0.24), the CUDA graphs (0.34 for 16 sequences) and
    the rest, as vLLM 0.26 logs them on an H200. The weights come from the architecture, built without storage. In 4-bit a
    linear layer takes 4 bits a weight and an 8-bit scale for each 64, unless the checkpoint lists it among those kept in
    16 bits, as all else is.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    quantization = getattr(config, "quantization_config", None) or {}
    kept = quantization.get("llm_int8_skip_modules") or []
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in network.parameters())
    linear = [(name, m.weight) for name, m in network.named_modules() if isinstance(m, torch.nn.Linear)]
    linear = [(name, weight) for name, weight in linear if weight is not network.get_output_embeddings().weight]
    quantized = sum(w.numel() for name, w in linear if load_in_4bit and not any(part in name for part in kept))
    adapter = sum(lora_r * sum(weight.shape) for _, weight in linear)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    token_bytes = 4 * config.num_hidden_layers * kv_heads * head  # keys and values, in 16 bits
    return (quantized * 4.125 / 8 + (total - quantized + adapter) * 2) / GIB + 0.7, token_bytes / GIB


def vllm_arguments(config, model: str, gpu: Gpu, room_gib: float, free_gib: float) -> dict:
    """What turns Unsloth's loader into a loader with vLLM: its share of the card, and how many sequences it decodes.

    `room_gib` is what this process may take, `free_gib` what is free on the card: Unsloth multiplies the share by that,
    so it is handed over as a share of it. Raises Refused where the engine would leave less than 2.5 GiB of the room for
    the training pass, which took 2.2 GiB for 8 completions of 1,024 tokens on Qwen3-4B's shape; and where it has no room
    for one sequence, which vLLM by itself finds out after two loads of the model.
    """
    fixed, token = engine_gib(model, config.load_in_4bit, config.lora_r)
    card = config.vram_limit_gib or gpu.total_gib
    wanted = (config.gpu_memory_utilization or 0) * card or fixed + config.kv_cache_gib
    least = fixed + token * config.max_seq_length
    sequence = f"one sequence of {config.max_seq_length} tokens"
    if wanted < least and config.gpu_memory_utilization:
        raise Refused(
            f"--gpu-memory-utilization {config.gpu_memory_utilization:g} is {wanted:.1f} GiB; weights, graphs and {sequence} "
            f"take {least:.1f}: at least {math.ceil(least / card * 100) / 100:g}, or leave it away"
        )
    if wanted < least:
        raise Refused(f"--kv-cache-gib {config.kv_cache_gib:g}: {sequence} takes {least - fixed:.2f}: at least that")
    if wanted + 2.5 > room_gib:
        knob = "gpu_memory_utilization" if config.gpu_memory_utilization else "kv_cache_gib"
        raise Refused(
            f"vLLM takes {wanted:.1f} GiB and training 2.5, but {room_gib:.1f} are there: a smaller {flag(knob)} (now "
            f"{getattr(config, knob):g}), --load-in-4bit, a smaller --model, or --no-fast-inference"
        )
    return {
        "fast_inference": True,
        "max_lora_rank": config.lora_r,
        "gpu_memory_utilization": wanted / free_gib,
        "max_num_seqs": max(16, config.effective_batch),
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
