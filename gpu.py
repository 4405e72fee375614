"""What NVML knows of the card, without importing torch: which GPU is visible, its driver, and its memory in use.

Memory is in GiB (2**30 bytes) everywhere. On a machine without an NVIDIA driver every function says so and none fails.
"""

import dataclasses
import math
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


def find_gpu(index: int = 0) -> tuple[Gpu | None, str]:
    """The first GPU that CUDA will see, or the one after so many others, and in words why that one, or why there is none.

    CUDA_VISIBLE_DEVICES is honoured (indices in PCI order, or UUIDs), and so is Unsloth's UNSLOTH_FORCE_CPU=1.
    """
    if os.environ.get("UNSLOTH_FORCE_CPU") == "1":
        return None, "UNSLOTH_FORCE_CPU is 1"
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = [str(i) for i in range(count)] if wanted is None else [name.strip() for name in wanted.split(",")]
        one = visible[index] if index < len(visible) else ""
        for i in range(count):
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            if one == str(i) or (one.startswith("GPU-") and uuid.startswith(one)):
                gpu = Gpu(
                    uuid=uuid,
                    cuda_name=one,
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
