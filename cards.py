"""Common cards, as numbers: memory in GiB (2**30 bytes), bandwidth in GB/s (1e9 bytes), rate in TFLOP/s."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Card:
    """A card: what CUDA reports as its memory and its kind, its bandwidth, and dense bf16 products with fp32 sums."""

    name: str
    vram_gib: float
    bandwidth_gbps: float
    bf16_tflops: float | None = None
    compute_capability: tuple[int, int] | None = None


# Memory: what CUDA reports as the total on Linux, as it stands in torch's out-of-memory messages, Unsloth's banners and
# llama.cpp's logs in public issue threads (the lowest where they differ; ECC on for L4 to RTX 6000 Ada); Windows reports more.
# Bandwidth and rate: NVIDIA's architecture papers (Ampere GA102, Ada, RTX Blackwell) and data sheets, read in transcriptions
# (lamonoai/gpumap, nvidia/GPU.md). GeForce cards sum in fp32 at half of their fp16 rate.
CARDS = {
    card.name: card
    for card in (
        Card("rtx-3060", 11.63, 360, 25.5, (8, 6)),
        Card("rtx-4070", 11.59, 504, 58.3, (8, 9)),
        Card("rtx-5070", 11.5, 672, 61.7, (12, 0)),
        Card("rtx-4060-ti-16gb", 15.57, 288, 44.1, (8, 9)),
        Card("rtx-4080", 15.57, 717, 97.5, (8, 9)),
        Card("rtx-5070-ti", 15.44, 896, 87.9, (12, 0)),
        Card("rtx-5080", 15.46, 960, 112.6, (12, 0)),
        Card("rtx-4000-ada", 19.5, 360, 106.9, (8, 9)),
        Card("rtx-3090", 23.56, 936, 71, (8, 6)),
        Card("rtx-4090", 23.51, 1008, 165.2, (8, 9)),
        Card("rtx-5090", 31.34, 1792, 209.5, (12, 0)),
        Card("a10", 21.98, 600, 125, (8, 6)),
        Card("a10g", 21.98, 600, 70, (8, 6)),
        Card("l4", 22.03, 300, 121, (8, 9)),
        Card("l40s", 44.39, 864, 362, (8, 9)),
        Card("rtx-a6000", 44.43, 768, 154.8, (8, 6)),
        Card("rtx-6000-ada", 44.43, 960, 364.2, (8, 9)),
        Card("rtx-pro-6000", 94.5, 1792, 503.8, (12, 0)),
        Card("a100-40gb", 39.49, 1555, 312, (8, 0)),
        Card("a100-80gb-pcie", 79.15, 1935, 312, (8, 0)),
        Card("a100-80gb-sxm", 79.15, 2039, 312, (8, 0)),
        Card("h100", 79.11, 3350, 989, (9, 0)),
        Card("h100-nvl", 93.0, 3938, 835, (9, 0)),
        Card("h200", 139.8, 4800, 989, (9, 0)),
    )
}
