"""What is seen while a run goes on: one line a step, and now and then a completion with its rewards.

Import it after unsloth.
"""

import resource
import time

import mlflow
import pandas
from transformers import TrainerCallback


class Progress(TrainerCallback):
    """Prints a line for each step, and samples to the screen and the record every `c.sample_steps` steps."""

    def __init__(self, c, console, peak, run_dir):
        self.c, self.console, self.peak, self.run_dir = c, console, peak, run_dir
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.show_samples(state.global_step)
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.start)

    def on_train_end(self, args, state, control, **kwargs):
        self.show_samples(state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:  # the summary after the last step has none
            self.console.say(self.line(state.global_step, logs))

    def line(self, step: int, logs: dict) -> str:
        """Reward, its parts, KL where there is one, generated tokens a second over the whole step, seconds, memory."""
        seconds = self.seconds[-1]
        parts = [f"step {step:{len(str(self.c.max_steps))}}/{self.c.max_steps}", f"reward {logs['reward']:.3f}"]
        for key, value in logs.items():
            if key.startswith("rewards/") and key.endswith("/mean"):
                parts.append(f"{key.split('/')[1].removesuffix('_reward')} {value:.3f}")
        if self.c.beta:
            parts.append(f"kl {logs.get('kl', float('nan')):.4f}")
        tokens = logs["completions/mean_length"] * self.c.effective_batch
        # the first step compiles and warms up: it says little about the ones to come
        typical = sorted(self.seconds[1:] or self.seconds)[len(self.seconds[1:] or self.seconds) // 2]
        left = round(typical * (self.c.max_steps - step))
        return "  ".join([*parts, f"{tokens / seconds:.0f} tok/s", f"{seconds:.1f} s", f"{memory_gib(self.peak):.1f} GiB",
                          f"eta {left // 60}:{left % 60:02d}"])  # fmt: skip

    def show_samples(self, step: int) -> None:
        """The best and the worst completion of the step just done, read from the file that TRL writes of each step."""
        if not self.c.sample_steps or not step or step % self.c.sample_steps:
            return
        table = pandas.read_parquet(self.run_dir / "completions" / f"completions_{step:05d}.parquet")
        table["prompt"] = table["prompt"].map(last_message)
        table["completion"] = table["completion"].map(last_message)
        mlflow.log_table(table, "samples.json")
        ranked = table.sort_values("advantage", ascending=False)
        for _, row in ranked.iloc[[0, -1]].iterrows():
            rewards = "  ".join(f"{k.removesuffix('_reward')} {v:g}" for k, v in row.items() if k not in FIXED_COLUMNS)
            self.console.say(f"    {row['prompt']!r} -> {row['completion'][-300:]!r}  {rewards}")


# What TRL writes of each completion besides the rewards.
FIXED_COLUMNS = ("step", "prompt", "completion", "advantage")


def last_message(messages) -> str:
    """The text of a prompt or completion: a string, or the last of its chat messages."""
    return messages if isinstance(messages, str) else messages[-1]["content"]


def memory_gib(peak) -> float:
    """Peak memory so far in GiB: the card's, or on a CPU this process's."""
    return peak.peak_gib if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
