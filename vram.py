"""What a run's memory was made of, measured line by line beside the plan of budget.py. Import it after unsloth.

NVML sees the whole card. torch's counters see its allocator, in which vLLM's KV cache lies too; they miss the CUDA context,
libraries, kernels and a part of the graphs. The lines are measured where they come from: tensors are summed up, engine and
parts of a step report what they took. Memory is in GiB (2**30 bytes).
"""

import functools

import torch

from phases import harmless
from record import worker_of

GIB = 2**30
ENGINE = {  # methods of vllm.v1.worker.gpu_worker.Worker, read in vLLM 0.26.0, in the order in which they are called
    "load_model": "vllm_weights",
    "determine_available_memory": "vllm_profile",
    "initialize_from_config": "vllm_cache",
    "compile_or_warm_up_model": "vllm_graphs",
}


class Meter:
    """Measures the lines of a budget.Plan while a run goes on.

    `gpu` is gpu.Gpu, `peak` gpu.PeakMemory, `phases` phases.Phases, `say` prints a line; without a plan (on a CPU) nothing is
    measured. `points` are the counters after each phase of the start, by name: what the card holds for this process (NVML,
    above what it held before, so others must not come or go), torch's tensors, torch's blocks. `sleeps`: vLLM gives its cache
    back between rollouts.
    """

    def __init__(self, gpu, peak, phases, plan, say, sleeps=False):
        self.gpu, self.peak, self.phases, self.plan, self.say, self.sleeps = gpu, peak, phases, plan, say, sleeps
        self.off = plan is None
        self.points = {}
        self.lines = {}  # by the plan's keys
        self.at("context")

    @harmless
    def at(self, point: str) -> None:
        """Take the counters."""
        torch.cuda.synchronize()
        card = self.gpu.used_gib() - self.peak.start_gib
        self.points[point] = card, torch.cuda.memory_allocated() / GIB, torch.cuda.memory_reserved() / GIB

    @harmless
    def watch_engine(self) -> None:
        """Take the counters after each phase of vLLM's start."""
        from vllm.v1.worker.gpu_worker import Worker

        for name, point in ENGINE.items():
            setattr(Worker, name, self.followed(getattr(Worker, name), point))

    def followed(self, method, point: str):
        @functools.wraps(method)
        def wrapper(*arguments, **named):
            result = method(*arguments, **named)
            self.at(point)
            return result

        return wrapper

    @harmless
    def loaded(self, model) -> None:
        """Weights, adapter and, with vLLM, what its engine holds, from the tensors themselves."""
        self.at("adapter")
        self.lines["weights"] = size([*(p for p in model.parameters() if not p.requires_grad), *model.buffers()])
        self.lines["lora"] = size([p for p in model.parameters() if p.requires_grad])
        engine = getattr(model, "vllm_engine", None)
        if engine is None:
            return
        worker = worker_of(engine)
        slots = [getattr(module, name, ()) for module in worker.model_runner.model.modules()
                 for name in ("lora_a_stacked", "lora_b_stacked")]  # fmt: skip
        self.lines["lora"] += size(slots)
        self.lines["kv_cache"] = sum(t.size for t in worker.model_runner.kv_cache_config.kv_cache_tensors) / GIB
        self.lines["vllm_activations"] = worker.peak_activation_memory / GIB
        self.lines["vllm_graphs"] = self.points["vllm_graphs"][0] - self.points["vllm_cache"][0]

    @harmless
    def cache(self, tensors: list[torch.Tensor]) -> None:
        """The cache of continuous batching, which the first rollout has just made, and which stays."""
        self.lines["kv_cache"] = size(tensors)
        self.phases.stays(round(self.lines["kv_cache"] * GIB))

    @harmless
    def gradients(self, model) -> None:
        """In the first step, before they are used; they are as large in all others."""
        if "gradients" not in self.lines:
            self.lines["gradients"] = size([p.grad for p in model.parameters() if p.grad is not None])

    @harmless
    def optimizer(self, optimizer) -> None:
        """After the first step, which makes its state."""
        if "optimizer" not in self.lines:
            self.at("first step")
            self.lines["optimizer"] = size([list(state.values()) for state in optimizer.state.values()])

    def counters(self) -> dict[str, list]:
        """What each counter saw after each phase, in columns."""
        names = ("card", "torch_tensors", "torch_blocks")
        columns = {f"{name}_gib": [values[i] for values in self.points.values()] for i, name in enumerate(names)}
        return {"after": list(self.points), **columns}

    @harmless
    def trained(self) -> list[dict] | None:
        """Predicted and measured GiB of each line and of the total, once a step has been taken, and metrics of them.

        What the lines do not explain is `other`. Where logits, or what generates, is the highest moment, it counts with
        what it adds to the training pass: so does vLLM's cache in sleep mode, in which it has gone from the card by then,
        though not from torch's counters.
        """
        self.at("trained")
        self.phases.settle()
        lines, peaks = self.lines, {part: peak / GIB for part, peak in self.phases.peaks.items()}
        pool = beside = 0.0  # of vLLM's graphs: in torch's blocks without a tensor, and outside of torch
        if "vllm_graphs" in lines:
            grown = [after - before for after, before in zip(self.points["vllm_graphs"], self.points["vllm_cache"])]
            pool, beside = grown[2] - grown[1], grown[0] - grown[2]
        stays = "kv_cache" in lines
        lines["generation"] = max(peaks["generation"], peaks.get("evaluation", 0.0))
        lines.setdefault("kv_cache", lines["generation"])
        card, _, reserved = self.points["trained"]
        if self.sleeps:
            card += lines["kv_cache"]
        lines["context"] = card - reserved - beside
        lines["activations"] = peaks["forward_backward"] - lines["gradients"]
        lines["logits"] = peaks.get("logits", 0.0)
        lines["slack"] = (self.phases.reserved - self.phases.allocated) / GIB - pool
        total = self.peak.peak_gib - self.peak.start_gib
        counted = {
            **lines,
            "vllm_activations": 0.0,
            "generation": 0.0,
            "logits": self.phases.highest / GIB - peaks["forward_backward"],
        }
        if not stays:
            counted["kv_cache"] = 0.0
        elif self.sleeps:
            training = counted["gradients"] + counted["activations"] + counted["logits"]
            counted["kv_cache"] = max(lines["kv_cache"] + lines["vllm_activations"] - training, 0.0)
        lines["other"] = total - sum(counted.values())
        rows = [row(line.label, line.key, line.gib, lines.get(line.key), line.kind) for line in self.plan.lines if line.gib]
        return [*rows, row("total", "total", self.plan.total_gib, total, "estimated")]


def row(line: str, key: str, predicted: float, measured: float | None, kind: str) -> dict:
    return {"line": line, "key": key, "predicted_gib": predicted, "measured_gib": measured, "kind": kind}


def in_words(rows: list[dict]) -> list[str]:
    """The table for the screen: predicted, measured, and the difference in per cent of what was measured."""
    lines = [f"{'memory, GiB':20} predicted  measured  (in brackets: not there at the peak, or not all of it)"]
    for r in rows:
        predicted, measured = r["predicted_gib"], r["measured_gib"]
        off = f"{100 * (predicted / measured - 1):+6.1f} %" if measured and measured > 0.005 else ""
        lines.append(f"{r['line']:20} {predicted:9.2f} {measured or 0:9.2f} {off}")
    return lines


def size(things) -> float:
    """GiB of the storages on the card behind tensors, each once, also those of bitsandbytes' quantization states."""
    storages = {}
    for tensor in tensors(things):
        if tensor.is_cuda:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) / GIB


def tensors(thing):
    """Every tensor in nested containers; a quantized weight brings its scales with it."""
    if isinstance(thing, torch.Tensor):
        yield thing
        yield from tensors(getattr(thing, "quant_state", None))
        yield from tensors(getattr(thing, "bnb_quant_state", None))
    elif isinstance(thing, dict):
        yield from tensors(list(thing.values()))
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from tensors(part)
    elif hasattr(thing, "absmax"):  # bitsandbytes.functional.QuantState
        yield from tensors([thing.absmax, thing.code, thing.offset, thing.state2])
