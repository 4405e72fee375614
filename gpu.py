"""What NVML knows of the card, without importing torch: which GPU is visible, its driver, and its memory in use.

Memory is in GiB (2**30 bytes) everywhere. On a machine without an NVIDIA driver every function says so and none fails.
"""

import dataclasses
import os
import threading

import pynvml

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
        """Memory in use on the whole card, by every process, the driver's own reserve left out."""
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
    except pynvml.NVMLError as error:
        return None, f"no CUDA GPU is visible ({str(error).lower()})"
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        wanted = ",".join(str(i) for i in range(count))
    first = wanted.split(",")[0].strip()
    for i in range(count):
        handle = pynvml.nvmlDeviceGetHandleByIndex(i)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        if first == str(i) or (first.startswith("GPU-") and uuid.startswith(first)):
            total_gib = pynvml.nvmlDeviceGetMemoryInfo(handle).total / GIB
            gpu = Gpu(
                uuid=uuid,
                cuda_name=first,
                name=pynvml.nvmlDeviceGetName(handle),
                driver=pynvml.nvmlSystemGetDriverVersion(),
                total_gib=total_gib,
                compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            )
            return gpu, f"{gpu.name} with {total_gib:.0f} GiB is visible"
    return None, f"no CUDA GPU is visible (CUDA_VISIBLE_DEVICES is {wanted!r}, the machine has {count})"


class PeakMemory(threading.Thread):
    """Samples the card's memory in use every 0.2 s, until the process ends; `peak_gib` is the highest value seen.

    torch's counters miss the CUDA context, libraries and graphs: this one sees all that the card holds.
    """

    def __init__(self, gpu: Gpu):
        super().__init__(daemon=True)
        self.gpu = gpu
        self.start_gib = self.peak_gib = gpu.used_gib()
        self.start()

    def run(self):
        tick = threading.Event()
        while not tick.wait(0.2):
            self.peak_gib = max(self.peak_gib, self.gpu.used_gib())


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
    room = limit_gib - (gpu.used_gib() - start_gib) - 0.5
    torch.cuda.set_per_process_memory_fraction(room * GIB / total)
    return min(room, free / GIB)


def engine_gib(model: str, load_in_4bit: bool, kv_cache_gib: float) -> float:
    """GiB that vLLM needs for a model folder or hub id: weights, a KV cache of `kv_cache_gib`, and 0.8 around them.

    The weights come from the architecture, built without storage: 4-bit linear layers take 4 bits and an 8-bit scale
    for each 64 weights, all else 16 bits. The 0.8 GiB holds the peak activation (0.24), the CUDA graphs (0.34 for
    16 sequences), the adapter and the rest, as read from vLLM 0.26's log on an H200.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    total = sum(p.numel() for p in network.parameters())
    head = network.get_output_embeddings()
    linear = sum(m.weight.numel() for m in network.modules() if isinstance(m, torch.nn.Linear) and m is not head)
    weights = (linear * (4.125 / 8) + (total - linear) * 2) if load_in_4bit else total * 2
    return weights / GIB + kv_cache_gib + 0.8
