"""What happens around each step: one line, now and then samples, an evaluation, a checkpoint, a warning, an early end.

Import it after unsloth.
"""

import math
import resource
import statistics
import time
import zlib

import pandas
import torch
from transformers import TrainerCallback

import checkpoints
import symptoms
import vram
from data import last_message


class Diverged(Exception):
    """The gradient, which all processes have, is no number any more; the step that it would have spoiled was not taken."""

    in_all_processes = True


class Progress(TrainerCallback):
    """The trainer's callback; `stop` is a stopping.Stop, `evaluation` a held_out.HeldOut or None.

    `facts` go into each checkpoint: what is known of the run, and its held-out points so far. `phases` is a phases.Phases,
    `meter` a vram.Meter, `pace` a function from sequences and their tokens to the card's tokens a second, or None. Of a
    parallel.World each process has one, with all that they decide together; only the first one looks at samples and symptoms.
    """

    def __init__(
        self, config, task, world, console, peak, run_dir, record, stop, facts, evaluation, can_think, phases, meter, pace
    ):
        self.world = world
        self.config, self.console, self.peak, self.run_dir, self.record = config, console, peak, run_dir, record
        self.stop, self.facts, self.evaluation, self.can_think = stop, facts, evaluation, can_think
        self.phases, self.meter, self.pace = phases, meter, pace
        self.memory = []  # rows of the memory table, once training is over
        self.tokens_seen = self.tokens_in_step = self.generated = 0  # generated: in the last rollout
        self.reward_names = [reward.__name__ for reward in task.REWARDS]
        self.examples = task.EXAMPLES
        self.best_reward = max(sum(example["rewards"]) for example in task.EXAMPLES)
        self.seconds = []
        self.highest_gib = 0.0  # of all processes
        self.warned = set()

    def on_train_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        self.tokens_seen = state.num_input_tokens_seen
        if state.global_step:  # a checkpoint brings its learning rate and weight decay back: the config's may be others
            lr_scheduler.base_lrs = [args.learning_rate] * len(lr_scheduler.base_lrs)
            lr_scheduler.last_epoch -= 1
            lr_scheduler.step()
            optimizer.param_groups[0]["weight_decay"] = args.weight_decay  # the second group is of what never decays

    def on_step_begin(self, args, state, control, **kwargs):
        self.look_back(state)
        self.console.doing = f"training, step {state.global_step + 1}"
        self.start = time.perf_counter()
        self.phases.begin_step()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if not torch.isfinite(norm):
            raise Diverged(
                f"grad_norm is {norm:.0f} in step {state.global_step + 1}, which was not taken: the adapter is the one before. "
                f"A smaller --learning-rate (now {self.config.learning_rate:g}), and rewards that are finite, keep it a number"
            )
        self.meter.gradients(model)
        self.phases.enter("optimizer")

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.phases.leave()
        self.meter.optimizer(optimizer)

    def on_step_end(self, args, state, control, **kwargs):
        step, config = state.global_step, self.config
        asked = self.agreed()
        self.seconds.append(time.perf_counter() - self.start)
        self.parts = self.phases.end_step()
        if len(self.seconds) == 1:
            evaluated = self.evaluation.seconds_before if self.evaluation else 0
            start = {"imports": self.phases.imports, "to_first_step": time.perf_counter() - self.phases.made - evaluated}
            self.record.metrics({f"start_seconds/{part}": seconds for part, seconds in start.items()})
        if asked is None and config.eval_steps and step % config.eval_steps == 0 and step < config.max_steps:
            if self.world.is_main:
                self.evaluation.during(step)
            asked = self.agreed()
            self.console.doing = f"training, step {step}"
        # a checkpoint lies between two rollouts, since the completions in use are not part of it
        rollout = config.steps_per_rollout
        between = step % rollout == 0 or step >= config.max_steps
        due = step // config.save_steps > (step - rollout) // config.save_steps or step >= config.max_steps
        control.should_training_stop |= asked is not None and between
        control.should_save = between and (due or asked is not None)

    def agreed(self) -> int | None:
        """The signal that any process has heard by now, on which all act together."""
        asked = int(max(row[0] for row in self.world.gather([self.stop.asked or 0]))) or None
        self.stop.asked = self.stop.asked or asked  # one that comes just now counts the next time
        self.stop.agreed = asked is not None
        return asked

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            logs = {**logs, **self.of_all(logs), **self.speed(logs)}
            state.log_history[-1].update(logs)
        self.record.metrics(logs, state.global_step)
        if "loss" in logs:  # the summary after the last step has none
            self.console.say(self.line(state.global_step, logs))

    def on_save(self, args, state, control, model=None, **kwargs):
        self.world.check_the_same(model)  # and have written their random states
        if not self.world.is_main:
            return
        written = self.run_dir / f"checkpoint-{state.global_step}"
        self.facts["step"] = state.global_step
        checkpoints.publish(written, self.facts, self.config.save_total_limit)

    def on_train_end(self, args, state, control, **kwargs):
        self.look_back(state)
        if self.seconds and (rows := self.meter.trained()):
            self.memory = rows
            self.record.memory_table(self.memory, self.meter.counters())
            for line in vram.in_words(self.memory):
                self.console.say(line)

    def of_all(self, logs: dict) -> dict[str, float]:
        """With several processes, what each has alone: tokens a second and peak memory; and the means of what Unsloth logs of
        each alone."""
        if self.world.size == 1:
            return {}
        means = [name for name in ("kl", "completion_length") if name in logs]
        speed = self.phases.own_speed if self.parts["generation"] else 0.0
        rows = self.world.gather([speed, memory_gib(self.peak), *(logs[name] for name in means)])
        found = {name: statistics.mean(row[2 + i] for row in rows) for i, name in enumerate(means)}
        self.highest_gib = max(row[1] for row in rows)
        for rank, (speed, peak_gib, *_) in enumerate(rows):
            found[f"process/{rank}/{'vram' if self.peak else 'rss'}_peak_gib"] = peak_gib
            if speed:
                found[f"process/{rank}/tokens_per_second"] = speed
        return found

    def speed(self, logs: dict) -> dict[str, float]:
        """Seconds of the step by part, tokens a second, and what share that is of what the card's bandwidth allows."""
        found = {f"seconds/{part}": seconds for part, seconds in self.parts.items()}
        generating, training = self.parts["generation"], self.parts["forward_backward"]
        batch = self.config.rollout_batch * self.world.size
        if "completions/mean_length" in logs:  # the later steps of a rollout generate none
            tokens, self.tokens_seen = logs["num_tokens"] - self.tokens_seen, logs["num_tokens"]
            self.generated = logs["completions/mean_length"] * batch
            self.tokens_in_step = tokens * self.config.effective_batch / self.config.rollout_batch
            if generating:
                found["tokens_per_second/generated"] = self.generated / generating
            if self.pace and self.generated and generating:
                allowed = self.world.size * self.pace(self.config.rollout_batch, (tokens - self.generated / 2) / batch)
                found["roofline_share"] = found["tokens_per_second/generated"] / allowed
        if training:
            found["tokens_per_second/trained"] = self.tokens_in_step / training
        return found | {"tokens_per_second/overall": self.generated / self.config.steps_per_rollout / self.seconds_a_step()}

    def seconds_a_step(self) -> float:
        """The mean of the last whole rollout's steps, or of those so far: its first one generates for all of them."""
        return statistics.mean(self.seconds[-self.config.steps_per_rollout :])

    def eta(self, left: int) -> int:
        """Seconds for so many steps, by the last rollouts; the first one compiles and warms up, and says little."""
        each = self.config.steps_per_rollout
        rollouts = [statistics.mean(self.seconds[i : i + each]) for i in range(0, len(self.seconds) - each + 1, each)]
        return round(left * statistics.median(rollouts[1:][-5:] or rollouts or [self.seconds_a_step()]))

    def line(self, step: int, logs: dict) -> str:
        """Reward, its parts, KL and clipped share where there is one, generated tokens a second over whole steps, memory."""
        seconds, last = self.seconds[-1], self.config.max_steps
        parts = [f"step {step:{len(str(last))}}/{last}"]
        if "reward" in logs:
            parts.append(f"reward {number(logs['reward'])}")
            parts += [f"{name.removesuffix('_reward')} {number(logs[f'rewards/{name}/mean'])}" for name in self.reward_names]
        else:
            parts.append(f"{(step - 1) % self.config.steps_per_rollout + 1} of {self.config.steps_per_rollout} of its rollout")
        if "kl" in logs and self.config.beta:
            parts.append(f"kl {logs['kl']:.4f}")
        if self.config.steps_per_rollout > 1 and "clip_ratio/region_mean" in logs:
            parts.append(f"clipped {logs['clip_ratio/region_mean']:.4f}")
        left = self.eta(last - step)
        speed = logs["tokens_per_second/overall"]
        parts += [f"{speed:.0f} tok/s", f"{seconds:.1f} s", f"{max(self.highest_gib, memory_gib(self.peak)):.1f} GiB"]
        return "  ".join([*parts, f"eta {left // 60}:{left % 60:02d}"])

    def look_back(self, state) -> None:
        """Samples and symptoms of the step just done, whose completions TRL has written to a file by now."""
        if not (self.seconds and self.world.is_main):
            return
        step, config = state.global_step, self.config
        if "completions/mean_length" in next(log for log in reversed(state.log_history) if "loss" in log):
            ratio = statistics.mean(map(compression_ratio, self.completions(step)["completion"]))
            self.record.metrics({"completions/compression_ratio": ratio}, step)
        if config.sample_steps and step % config.sample_steps == 0:
            table = self.completions(step)
            self.record.samples(table.to_dict("list"))
            ranked = table.sort_values("advantage", ascending=False)
            self.show(ranked.iloc[[0, -1]])
        for name, text in symptoms.find(state.log_history, config, self.best_reward, self.can_think).items():
            if name in self.warned:
                continue
            self.warned.add(name)
            self.console.say(f"warning: {text}")
            self.record.warning(name, text, step)
            if name == "all_zero":
                self.show(self.completions(step).iloc[:3])

    def figures(self, trainer) -> dict:
        """By name in pictures.FIGURES, functions that return what is known by the end of the run, or None."""
        return {
            "reward_curve": lambda: self.reward_curve(trainer.state.log_history),
            "memory": self.memory_bars,
            "step_time": lambda: self.step_time(trainer.state.log_history),
        }

    def step_time(self, history: list[dict]) -> list[dict]:
        """The trainer's history as pictures.step_time draws it."""
        return [
            {"step": log["step"], **{k.removeprefix("seconds/"): v for k, v in log.items() if k.startswith("seconds/")}}
            for log in history
            if "seconds/rest" in log
        ]

    def memory_bars(self) -> dict | None:
        """The memory table as pictures.memory draws it, or None before the end and on a CPU."""
        return {"rows": self.memory, "limit_gib": self.meter.plan.usable_gib} if self.memory else None

    def reward_curve(self, history: list[dict]) -> dict | None:
        """The trainer's history as pictures.reward_curve draws it, or None before the first step."""
        names, examples = self.reward_names, self.examples
        steps = [
            {"step": log["step"], **{name: log.get(f"rewards/{name}/mean") for name in names}}
            for log in history
            if "reward" in log
        ]
        best = {name: float(max(example["rewards"][i] for example in examples)) for i, name in enumerate(names)}
        held_out = self.facts["held_out"]
        return {"steps": steps, "rewards": names, "best": best, "held_out": held_out} if steps else None

    def completions(self, step: int):
        """TRL's table of a step, with the last message of each prompt and completion."""
        table = pandas.read_parquet(self.run_dir / "completions" / f"completions_{step:05d}.parquet")
        table["prompt"] = table["prompt"].map(last_message)
        table["completion"] = table["completion"].map(last_message)
        return table

    def show(self, rows) -> None:
        for _, row in rows.iterrows():
            rewards = "  ".join(f"{name.removesuffix('_reward')} {number(row[name], 'g')}" for name in self.reward_names)
            self.console.say(f"    {row['prompt']!r} -> {row['completion'][-300:]!r}  {rewards}")


def compression_ratio(text: str) -> float:
    """Bytes of a text for each byte that zlib makes of it, as Whisper looks for loops: 2 for prose, 10 for a phrase again and
    again, below 1.4 for noise, and below 1 for a few words (Radford et al. 2022, section 4.5)."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def number(value, form: str = ".3f") -> str:
    """A reward as text; TRL takes None for "does not apply", and has None as the mean where it applies nowhere."""
    return "none" if value is None or math.isnan(value) else format(value, form)


def memory_gib(peak) -> float:
    """Peak memory so far in GiB: the card's, or on a CPU this process's."""
    return peak.peak_gib if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
