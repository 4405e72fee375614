"""Symptoms on logs as TRL writes them: silent on healthy runs, and one sentence with the cause where learning stalls."""

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symptoms import find
from train import PRESETS

SMOL, QWEN, EIGHT = PRESETS["smollm2"], PRESETS["chapter"], PRESETS["qwen3-4b"]  # EIGHT: groups a rollout

# a run as it was recorded (smollm2, seed 2): reward, share of groups without spread, share cut off, mean length
RECORDED = [
    (0.025, 0, 0.75, 19.6), (0.15, 0, 0.375, 19.3), (0.175, 0, 0.625, 19.9), (0.6, 0, 0.375, 19.6), (0.15, 0, 0.125, 19.1),
    (0.75, 0, 0.25, 18.6), (0.1, 0, 0.25, 18.1), (0.2, 1, 0, 17.5), (0.15, 0, 0, 18.9), (0.95, 0, 0, 16.1),
    (1.2, 1, 0, 19.0), (1.2, 1, 0, 18.0), (1.2, 1, 0, 18.0), (0.325, 0, 0, 19.0), (1.075, 0, 0, 18.8),
    (0.9, 0, 0.125, 16.6), (1.2, 1, 0, 19.0), (0.325, 0, 0, 19.0), (0.325, 0, 0, 19.0), (0.825, 0, 0, 16.0),
    (0.95, 0, 0, 19.0), (1.2, 1, 0, 18.0), (1.2, 1, 0, 20.0), (1.2, 1, 0, 19.0), (1.2, 1, 0, 18.0),
    (1.2, 1, 0, 16.0), (1.2, 1, 0, 19.0), (1.2, 1, 0, 19.0), (0.2, 1, 0.375, 19.5), (1.2, 1, 0, 19.0),
]  # fmt: skip


def rollout(reward=0.6, zero_std=0.0, clipped=0.0, length=15.0) -> dict:
    """The log of a step that generated."""
    return {
        "loss": 0.0, "grad_norm": 0.0 if zero_std == 1 else 0.2, "learning_rate": 3e-4, "reward": reward,
        "reward_std": 0.0 if zero_std == 1 else 0.4, "frac_reward_zero_std": zero_std,
        "rewards/correctness_reward/mean": max(0.0, reward - 0.2), "rewards/format_reward/mean": min(0.2, reward),
        "completions/clipped_ratio": clipped, "completions/mean_length": length, "completions/min_length": length - 3,
        "completions/max_length": length + 3, "completions/mean_terminated_length": length,
    }  # fmt: skip


def numbered(*logs) -> list[dict]:
    return [{**log, "step": step} for step, log in enumerate(logs, 1)]


def reused(logs) -> list[dict]:
    """The same history with num_iterations 2: after each rollout, a step on the same completions."""
    again = {"loss": 0.01, "grad_norm": 0.2, "learning_rate": 3e-4, "kl": 0.001}
    return numbered(*(step for log in logs for step in (log, again)))


def seen(logs, config=SMOL, best_reward=1.2, can_think=False) -> dict[str, str]:
    found = find(numbered(*logs), config, best_reward, can_think)
    assert all(len(sentence) <= 200 and "\n" not in sentence for sentence in found.values())
    return found


def silent_at_every_step(logs, config, can_think):
    for n in range(len(logs) + 1):
        assert seen(logs[:n], config, can_think=can_think) == {}, n


# healthy runs


def test_a_recorded_run_is_healthy():
    logs = [rollout(*values) for values in RECORDED]
    silent_at_every_step(logs, SMOL, can_think=False)
    silent_at_every_step(reused(logs), dataclasses.replace(SMOL, num_iterations=2), can_think=False)


@pytest.mark.parametrize("seed", range(20))
def test_a_small_model_that_learns_is_healthy(seed):
    """Half of the groups without spread at first, at the end all of them at the best reward."""
    draw, logs = random.Random(seed), []
    for step in range(30):
        if step >= 20:
            logs.append(rollout(1.2, 1, 0, draw.uniform(12, 19)))
        elif draw.random() < 0.5 - step / 60:
            logs.append(rollout(draw.choice([0.0, 0.2]), 1, draw.uniform(0.2, 0.7), draw.uniform(12, 19)))
        else:
            reward = draw.uniform(0.1, 0.3) + step / 30
            logs.append(rollout(reward, 0, max(0, draw.uniform(0.2, 0.7) - step / 30), draw.uniform(12, 19)))
    silent_at_every_step(logs, SMOL, can_think=False)


@pytest.mark.parametrize("config", [QWEN, EIGHT], ids=["a group a rollout", "eight"])
@pytest.mark.parametrize("seed", range(20))
def test_a_model_that_thinks_within_its_limit_is_healthy(seed, config):
    draw, logs = random.Random(seed), []
    for step in range(100 // config.prompts_per_rollout):
        right = [draw.random() < 0.3 + step * config.prompts_per_rollout / 200 for _ in range(config.prompts_per_rollout)]
        reward = sum(1.2 if all_right else draw.uniform(0.4, 1.1) for all_right in right) / len(right)
        logs.append(rollout(reward, sum(right) / len(right), draw.uniform(0.1, 0.4), draw.uniform(300, 500)))
    silent_at_every_step(logs, config, can_think=True)


def test_a_loss_near_zero_is_normal():
    assert seen([{**rollout(), "loss": loss} for loss in (0.0, 1e-9, -2e-8) * 10]) == {}


# each symptom, from the tenth rollout on and until it is over


SICK = {
    "clipped": rollout(0.1, 0, 1.0, 20),
    "no_spread": rollout(0.2, 1),
    "all_zero": rollout(0.0, 1),
}


@pytest.mark.parametrize("name", SICK)
def test_a_symptom_needs_ten_rollouts_and_goes_away(name):
    sick = [SICK[name]] * 10
    assert seen(sick[:9]) == {}
    assert list(seen(sick)) == [name]
    assert list(seen([rollout()] * 30 + sick)) == [name]
    assert seen([rollout()] * 30 + sick[:8]) == {}
    assert seen(sick + [rollout()] * 2) == {}


@pytest.mark.parametrize("name", SICK)
def test_steps_on_the_same_completions_are_no_rollouts(name):
    assert seen(reused([SICK[name]] * 9)) == {}
    assert list(seen(reused([SICK[name]] * 10))) == [name]
    assert seen(reused([SICK[name]] * 10 + [rollout()] * 2)) == {}


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, "missing"])
@pytest.mark.parametrize("name", SICK)
def test_values_that_are_not_there_are_passed_over(name, nothing):
    without = {key: nothing for key in SICK[name] if key != "step"} if nothing != "missing" else {"loss": 0.0}
    assert seen([SICK[name]] * 9 + [without] * 5) == {}
    assert list(seen([without] + [SICK[name], without] * 10)) == [name]
    assert seen([without] * 30) == {}


def test_clipped_names_thinking_where_it_is_on():
    logs = [rollout(0.1, 0, 0.97, 760)] * 10
    assert seen(logs, QWEN, can_think=True)["clipped"] == (
        "97 % of the last 80 completions were cut off at 768 tokens: thinking is on; --no-enable-thinking, or "
        "--max-completion-length 1536"
    )
    for thinking, can_think in ((None, False), (True, False)):
        text = seen(logs, dataclasses.replace(QWEN, enable_thinking=thinking), can_think=can_think)["clipped"]
        assert "thinking" not in text and "limit is too short" in text and text.endswith("--max-completion-length 1536")


@pytest.mark.parametrize(("groups", "rollouts"), [(1, 10), (2, 5), (3, 4), (4, 3), (8, 3), (16, 3)])
def test_a_window_holds_ten_groups_and_three_rollouts(groups, rollouts):
    """The least that are enough, and how many completions of 8 answers a group they are."""
    config = dataclasses.replace(EIGHT, steps_per_generation=groups)
    cut_off = rollout(0.1, 0, 1.0, 768)
    later = {"loss": 0.01, "grad_norm": 0.2, "clip_ratio/region_mean": 0.001}  # steps on the same rollout
    logs = [step for _ in range(rollouts) for step in [cut_off, *[later] * (groups - 1)]]
    assert seen(logs[:-groups], config) == {}
    assert f"100 % of the last {rollouts * groups * 8} completions" in seen(logs, config)["clipped"]
    again = dataclasses.replace(config, num_iterations=2)  # a rollout serves twice as many steps, and is one rollout
    assert seen(reused(logs), again).keys() == {"clipped"}
    trend = [rollout(length=50)] * rollouts + [rollout(length=200)] * rollouts
    assert seen(trend[:-1], config) == {}
    assert f"(first {rollouts * groups * 8} completions) to 200" in seen(trend, config)["running_away"]


def test_clipped_starts_at_nine_in_ten():
    assert list(seen([rollout(clipped=0.9)] * 10)) == ["clipped"]
    assert seen([rollout(clipped=0.89)] * 10) == {}


def test_no_spread_names_the_temperature():
    cold = dataclasses.replace(SMOL, temperature=0.3)
    assert seen([SICK["no_spread"]] * 10, cold)["no_spread"] == (
        "100 % of the last 10 groups earn the same with all 8 answers (reward 0.2 of 1.2), so nothing is learned: "
        "--temperature 0.3 is too low (try 1), or the task is too hard"
    )
    assert "--temperature 1 is too low (try 1.2)" in seen([SICK["no_spread"]] * 10)["no_spread"]


def test_no_spread_counts_groups_not_rollouts():
    # ten groups are at least two rollouts of eight, but fewer than three show no trend: 24 groups
    for config in (EIGHT, dataclasses.replace(SMOL, gradient_accumulation_steps=8)):
        one_teaches = [rollout(0.3, 1), rollout(0.3, 7 / 8), rollout(0.3, 1)]
        assert "96 % of the last 24 groups" in seen(one_teaches, config)["no_spread"]
        assert seen([*one_teaches, rollout(0.3, 7 / 8)], config) == {}  # 22 of the last 24
    assert seen([SICK["no_spread"]] * 9 + [rollout(0.3, 0)]) == {}  # one group of ten still teaches


@pytest.mark.parametrize(("reward", "zero_std"), [(1.2, 1), (1.19, 1), (1.3, 1), (1.15, 0.96)])
def test_no_spread_where_all_are_right_is_the_goal(reward, zero_std):
    assert seen([rollout(reward, zero_std)] * 10) == {}


def test_no_spread_below_the_best_is_a_symptom():
    assert list(seen([rollout(1.0, 1)] * 10)) == ["no_spread"]
    assert list(seen([rollout(1.17, 1)] * 10)) == ["no_spread"]
    # some problems always right, the others always wrong: a symptom until most are right
    assert list(seen([rollout(1.2, 1), rollout(0.2, 1)] * 5)) == ["no_spread"]
    assert seen([rollout(1.2, 1)] * 6 + [rollout(0.2, 1)] * 4) == {}


def test_no_spread_without_a_known_best():
    assert "too hard or too easy" in seen([rollout(1.2, 1)] * 10, best_reward=None)["no_spread"]


def test_all_zero_names_the_form():
    text = seen([SICK["all_zero"]] * 10, QWEN, best_reward=None)["all_zero"]
    assert text.startswith("every reward of the last 80 completions is 0: ") and "--worked-examples" in text


def test_all_zero_takes_every_reward():
    paid_and_punished = {**rollout(0.0, 1), "rewards/correctness_reward/mean": 0.2, "rewards/format_reward/mean": -0.2}
    assert "all_zero" not in seen([paid_and_punished] * 10)
    ranked = {**rollout(0.0, 0), "rewards/rank_reward/mean": 0.0}  # rewards that cancel out within a group
    assert seen([ranked] * 10) == {}
    assert seen([SICK["all_zero"]] * 9 + [rollout(0.025, 0)]) == {}


def test_all_zero_is_the_goal_where_rewards_only_punish():
    assert seen([rollout(0.0, 1)] * 10, best_reward=0.0) == {}
    assert list(seen([rollout(-0.5, 1)] * 10, best_reward=0.0)) == ["no_spread"]


def growing(start, factor, n):
    return [rollout(length=start * factor**i) for i in range(n)]


def test_running_away_names_both_lengths_and_the_knobs():
    logs = [rollout(length=50)] * 10 + [rollout(length=200)] * 10
    assert seen(logs, QWEN) == {
        "running_away": "mean length went from 50 tokens (first 80 completions) to 200 (last), and grows: "
        "a reward that pays for length? Else --beta 0.04, --learning-rate 2.5e-06"
    }
    other = dataclasses.replace(QWEN, loss_type="grpo", beta=0.0)
    assert seen(logs, other)["running_away"].endswith("--beta 0.02, --learning-rate 2.5e-06, --loss-type dr_grpo")
    assert list(seen(reused(logs), QWEN)) == ["running_away"]


def test_running_away_needs_two_windows():
    logs = growing(20, 1.2, 20)
    assert seen(logs[:19], QWEN) == {} and list(seen(logs, QWEN)) == ["running_away"]


def test_running_away_is_over_when_the_length_stays_or_falls():
    logs = growing(20, 1.2, 20)
    stays = [rollout(length=640)] * 20
    assert list(seen(logs + stays[:5], QWEN)) == ["running_away"]
    assert seen(logs + stays, QWEN) == {}
    crawls = [rollout(length=20)] * 10 + [rollout(length=200)] * 10 + [rollout(length=208)] * 10
    assert seen(crawls, QWEN) == {}
    assert seen(logs + [rollout(length=20)] * 10, QWEN) == {}


@pytest.mark.parametrize(("first", "last"), [(100, 299), (4, 35), (10, 41)])
def test_running_away_is_threefold_and_more_than_noise(first, last):
    assert seen([rollout(length=first)] * 10 + [rollout(length=last)] * 10, QWEN) == {}
    assert seen([rollout(length=first)] * 10 + [rollout(length=last + 1)] * 10, QWEN)


# whatever a log holds


NUMBERS = st.none() | st.floats() | st.integers() | st.sampled_from([0.0, 1.0])
LOGS = st.fixed_dictionaries({"step": st.integers(1, 1000)}, optional={**dict.fromkeys(rollout(), NUMBERS), "kl": NUMBERS})


@settings(deadline=None)
@given(
    logs=st.lists(LOGS, max_size=30) | LOGS.map(lambda log: [log] * 25),
    config=st.sampled_from([SMOL, QWEN, EIGHT]),
    best_reward=st.none() | st.floats(),
    can_think=st.booleans(),
)
def test_no_log_makes_it_raise(logs, config, best_reward, can_think):
    found = find(logs, config, best_reward, can_think)
    assert set(found) <= {"clipped", "no_spread", "all_zero", "running_away"}
    assert all(found.values())
