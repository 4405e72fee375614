"""What is seen while a run goes on: one line a step, and now and then a completion with its rewards.

Import it after unsloth.
"""

import resource
import statistics
import time

import mlflow
import pandas
from transformers import TrainerCallback

from data import last_message


class Progress(TrainerCallback):
    """Prints a line for each step, and samples to the screen and the record every `sample_steps` steps."""

    def __init__(self, config, reward_names, console, peak, run_dir):
        self.config, self.reward_names, self.console, self.peak, self.run_dir = config, reward_names, console, peak, run_dir
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.show_samples(state.global_step)
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.start)

    def on_train_end(self, args, state, control, **kwargs):
        self.show_samples(state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:  # the summary after the last step has none
            self.console.say(self.line(state.global_step, logs))

    def line(self, step: int, logs: dict) -> str:
        """Reward, its parts, KL where there is one, generated tokens a second over the whole step, seconds, memory."""
        seconds, last = self.seconds[-1], self.config.max_steps
        parts = [f"step {step:{len(str(last))}}/{last}"]
        if "reward" in logs:
            parts.append(f"reward {number(logs['reward'])}")
            parts += [f"{name.removesuffix('_reward')} {number(logs[f'rewards/{name}/mean'])}" for name in self.reward_names]
        else:  # with num_iterations above 1, the steps between two generations
            parts.append("same completions once more")
        if "kl" in logs and self.config.beta:
            parts.append(f"kl {logs['kl']:.4f}")
        tokens = logs.get("completions/mean_length", 0) * self.config.effective_batch
        # the first step compiles and warms up: it says little about the ones to come
        left = round(statistics.median(self.seconds[1:] or self.seconds) * (last - step))
        parts += [f"{tokens / seconds:.0f} tok/s", f"{seconds:.1f} s", f"{memory_gib(self.peak):.1f} GiB"]
        return "  ".join([*parts, f"eta {left // 60}:{left % 60:02d}"])

    def show_samples(self, step: int) -> None:
        """The best and the worst completion of the step just done, read from the file that TRL writes of each step."""
        if not self.config.sample_steps or not step or step % self.config.sample_steps:
            return
        table = pandas.read_parquet(self.run_dir / "completions" / f"completions_{step:05d}.parquet")
        table["prompt"] = table["prompt"].map(last_message)
        table["completion"] = table["completion"].map(last_message)
        mlflow.log_table(table, "samples.json")
        ranked = table.sort_values("advantage", ascending=False)
        for _, row in ranked.iloc[[0, -1]].iterrows():
            rewards = "  ".join(f"{name.removesuffix('_reward')} {number(row[name], 'g')}" for name in self.reward_names)
            self.console.say(f"    {row['prompt']!r} -> {row['completion'][-300:]!r}  {rewards}")


def number(value, form: str = ".3f") -> str:
    """A reward as text; TRL takes None for "does not apply", and has None as the mean where it applies nowhere."""
    return "none" if value is None else format(value, form)


def memory_gib(peak) -> float:
    """Peak memory so far in GiB: the card's, or on a CPU this process's."""
    return peak.peak_gib if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
