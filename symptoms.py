"""What is wrong when learning stalls, read off the logs of the steps: each symptom with its cause and a knob.

A rollout is a step that generated: where it feeds several steps (steps_per_generation, num_iterations), the later ones log no
reward and no lengths. One rollout may hold a single group, so every rule looks at as many of the last as hold GROUPS groups,
at least three, and needs that many.
A loss near 0 is no symptom: advantages sum up to 0, so in GRPO it says nothing.
"""

import math

from checks import is_finite

GROUPS = 10


def find(history: list[dict], config, best_reward: float | None, can_think: bool) -> dict[str, str]:
    """The symptoms present now, by name: what is seen, the likely cause, and the knob, in at most about 200 characters.

    `history` holds the logs of all steps since the first, as TRL hands them to on_log; what is missing, None or not finite
    is passed over. `config` is train.Config; `best_reward` the task's largest sum of rewards, None where it is not known;
    `can_think` whether the model's template has thinking, not switched off. Raises nothing.
    """
    found = {
        "clipped": clipped(history, config, can_think),
        "no_spread": no_spread(history, config, best_reward),
        "all_zero": all_zero(history, config, best_reward),
        "running_away": running_away(history, config),
    }
    return {name: sentence for name, sentence in found.items() if sentence}


def clipped(history, config, can_think) -> str | None:
    """At least 90 % of the completions reach max_completion_length (tokens), so that hardly an answer comes to its end."""
    last = with_values(history, "completions/clipped_ratio")[-window(config) :]
    share = mean(last, "completions/clipped_ratio")
    if len(last) < window(config) or share < 0.9:
        return None
    limit = config.max_completion_length
    cause = "the limit is too short, or no answer ever ends;"
    if can_think:
        cause = "thinking is on; --no-enable-thinking, or"
    seen = f"{100 * share:.0f} % of the last {completions(config)} completions were cut off at {limit} tokens"
    return f"{seen}: {cause} --max-completion-length {2 * limit}"


def no_spread(history, config, best_reward) -> str | None:
    """At least 95 % of the groups have one reward for all answers, and half of the rollouts or more are not all right.

    With one group a rollout, that is ten groups of ten. Rewards that are all zero are all_zero's.
    """
    last = with_values(history, "reward", "frac_reward_zero_std")[-window(config) :]
    share = mean(last, "frac_reward_zero_std")
    right = sum(all_right(log, best_reward) for log in last)
    if len(last) < window(config) or share < 0.95 or 2 * right > len(last) or all(map(pays_nothing, last)):
        return None
    top, cause = ("", "too hard or too easy") if best_reward is None else (f" of {best_reward:g}", "too hard")
    seen = f"{100 * share:.0f} % of the last {window(config) * config.prompts_per_rollout} groups earn the same with all"
    return (
        f"{seen} {config.num_generations} answers (reward {mean(last, 'reward'):.3g}{top}), so nothing is learned: "
        f"--temperature {config.temperature:g} is too low (try {max(1, config.temperature + 0.2):g}), or the task is {cause}"
    )


def all_zero(history, config, best_reward) -> str | None:
    """Every reward of every completion is 0, in a task where 0 is not the best there is."""
    last = with_values(history, "reward")[-window(config) :]
    if len(last) < window(config) or not all(map(pays_nothing, last)) or (best_reward is not None and best_reward <= 0):
        return None
    return (
        f"every reward of the last {completions(config)} completions is 0: nothing that pays is ever said, or its tag never "
        "parsed (samples below); show the form in the prompt (task.py: --worked-examples, --system)"
    )


def running_away(history, config) -> str | None:
    """Mean length (tokens) is 3 times that of the first rollouts and 32 more, and 5 % above the window before: it grows.

    Needs two windows, so that the first and the last share no rollout.
    """
    key = "completions/mean_length"
    known = with_values(history, key)
    size = window(config)
    if len(known) < 2 * size:
        return None
    first, before, now = (mean(part, key) for part in (known[:size], known[-2 * size : -size], known[-size:]))
    if now < 3 * first or now < first + 32 or now < 1.05 * before:
        return None
    loss_type = "" if config.loss_type == "dr_grpo" else ", --loss-type dr_grpo"
    return (
        f"mean length went from {first:.0f} tokens (first {completions(config)} completions) to {now:.0f} (last), and grows: "
        f"a reward that pays for length? Else --beta {2 * config.beta or 0.02:g}, --learning-rate "
        f"{config.learning_rate / 2:g}{loss_type}"
    )


def with_values(history, *keys) -> list[dict]:
    """The logs where each key has a finite number: None is TRL's mean of rewards that do not apply."""
    return [log for log in history if all(is_finite(log.get(key)) for key in keys)]


def mean(logs, key) -> float:
    return sum(float(log[key]) for log in logs) / max(len(logs), 1)


def window(config) -> int:
    """Rollouts that a rule looks at."""
    return max(3, math.ceil(GROUPS / config.prompts_per_rollout))


def completions(config) -> int:
    """Completions in one window."""
    return window(config) * config.rollout_batch


def pays_nothing(log) -> bool:
    """Whether rewards and their deviations are all zero: a mean alone is also 0 where rewards cancel out."""
    return not any(value for key, value in log.items() if key.startswith("reward") and is_finite(value))


def all_right(log, best_reward) -> bool:
    """Whether the groups without spread may all have earned the best, within 1 %."""
    slack = 1.01 - log["frac_reward_zero_std"]  # what is lacking beyond that 1 % may come from the groups with spread
    return best_reward is not None and log["reward"] >= best_reward - slack * abs(best_reward)
