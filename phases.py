"""Where a step's time goes, and torch's peak in each part of it. Import it after unsloth.

The parts are methods of TRL's trainer, which has no public place to measure them: read in TRL 1.15.0, and held by a test.
"""

import functools
import sys
import time

import psutil
import torch

from checks import one_line

# methods of trl.GRPOTrainer, which Unsloth overrides or leaves, but calls by these names; the inner one's time is its own.
# what _prepare_inputs does beside generating and rewarding is the log-probs under the old policy and the reference
METHODS = {
    "training_step": "forward_backward",
    "_prepare_inputs": "log_probs",
    "_generate": "generation",
    "_calculate_rewards": "rewards",
}
PARTS = ("generation", "rewards", "log_probs", "forward_backward", "optimizer")


def harmless(measuring):
    """A method that measures: where it fails, that is said once, and nothing more is measured; training goes on."""

    @functools.wraps(measuring)
    def wrapper(self, *arguments, **named):
        if self.off:
            return None
        try:
            return measuring(self, *arguments, **named)
        except Exception as error:
            self.off = True
            self.say(f"warning: measuring stops ({type(error).__name__}: {one_line(error)}); training goes on")

    return wrapper


class Phases:
    """Seconds of the parts of one step, and the bytes of torch's tensors that each part adds to what stands between steps.

    `seconds` is by part, of the step under way; `peaks` (bytes) the largest of the run so far, by part. The logits are a
    part of their own in bytes, above what stands when they are made, and none in time. CUDA is waited for where a part begins
    and ends, some fifteen times a step. `say` prints a line.
    """

    def __init__(self, on_gpu: bool, say):
        self.on_gpu, self.say, self.off = on_gpu, say, False
        self.imports = time.time() - psutil.Process().create_time()  # seconds from the start of the process to here
        self.made = time.perf_counter()
        self.open = []  # the parts under way, the innermost last
        self.seconds = {}
        self.own_speed = 0.0  # of several processes, this one's tokens a second in the last rollout
        self.peaks = {}
        self.allocated = self.reserved = 0  # bytes: torch's peaks over the whole run, which measuring the parts resets
        self.standing = 0  # bytes of tensors now
        self.base = self.before_logits = 0  # the same when the outermost part began, and when the logits did
        self.highest = 0  # the most above the base

    def begin_step(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.began = time.perf_counter()

    def end_step(self) -> dict[str, float]:
        """The seconds of the step by part, with the `rest` between them."""
        total = time.perf_counter() - self.began
        return {**self.seconds, "rest": max(total - sum(self.seconds.values()), 0.0)}

    @harmless
    def enter(self, part: str) -> None:
        self.settle()
        if not self.open:
            self.base = self.standing
        if part == "logits":
            self.before_logits = self.standing
        self.open.append(part)

    @harmless
    def leave(self) -> None:
        self.settle()
        self.open.pop()

    @harmless
    def settle(self) -> None:
        """What happened since the last call belongs to the innermost part under way."""
        if self.on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.open:
            clock = next((part for part in reversed(self.open) if part != "logits"), "logits")
            self.seconds[clock] = self.seconds.get(clock, 0.0) + now - self.since
        if self.on_gpu:
            stats = torch.cuda.memory_stats_as_nested_dict()  # once: each of torch's shorthands makes them anew
            peak, self.standing = (stats["allocated_bytes"]["all"][when] for when in ("peak", "current"))
            self.allocated = max(self.allocated, peak)
            self.reserved = max(self.reserved, stats["reserved_bytes"]["all"]["peak"])
            if self.open:
                part = self.open[-1]
                above = peak - (self.before_logits if part == "logits" else self.base)
                self.peaks[part] = max(self.peaks.get(part, 0), above)
                self.highest = max(self.highest, peak - self.base)
            torch.cuda.reset_peak_memory_stats()
        self.since = now

    @harmless
    def stays(self, size: int) -> None:
        """So many bytes were made in the part under way, and stay: they are none of its peak, nor of those around it."""
        self.base += size
        self.settle()

    def timed(self, part: str, function):
        """The function, as a part."""

        @functools.wraps(function)
        def wrapper(*arguments, **named):
            self.enter(part)
            try:
                return function(*arguments, **named)
            finally:
                self.leave()

        return wrapper

    def paced(self, generate):
        """TRL's `_generate_single_turn`, whose first result are token ids, and which waits for no other process."""

        @functools.wraps(generate)
        def wrapper(*arguments, **named):
            began = time.perf_counter()
            results = generate(*arguments, **named)
            self.own_speed = sum(map(len, results[0])) / (time.perf_counter() - began)
            return results

        return wrapper

    @harmless
    def attach(self, trainer, processes: int = 1) -> None:
        """Measure a trainer's methods; with Unsloth on a GPU also the logits, which it makes in an operator of its own.

        Its table of implementations is internal: read in unsloth_zoo 2026.10.9, fused_losses/fused_linear.py.
        """
        for name, part in METHODS.items():
            setattr(trainer, name, self.timed(part, getattr(trainer, name)))
        if processes > 1:
            trainer._generate_single_turn = self.paced(trainer._generate_single_turn)
        if self.on_gpu and "unsloth" in sys.modules:
            from unsloth_zoo.fused_losses import fused_linear

            for name in ("lp_impl", "lp_bwd_impl"):
                fused_linear._OPS[name] = self.timed("logits", fused_linear._OPS[name])
