"""The rewards and the data set. Runs without the 8 GB stack: uv run --only-group rewards pytest tests/test_task.py"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import task

CASES = json.loads((Path(__file__).parent / "reward_cases.json").read_text())

settings.register_profile("unhurried", deadline=None)  # a busy machine is no bug
settings.load_profile("unhurried")

# Text made of the pieces that matter to the parser, and of anything else.
PIECES = st.sampled_from(
    ["<ans>", "</ans>", "<think>", "</think>", "<ANS>", "42", "-", "+", " ", "\n", "٤٢", "４２", "²", "\0"]
)
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join)


def score(text, target):
    return (
        task.correctness_reward(prompts=[None], completions=[text], target=[target])[0],
        task.format_reward(prompts=[None], completions=[text])[0],
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["why"])
def test_reward_case(case):
    assert score(case["completion"], case["target"]) == (case["correctness"], case["format"])


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("a draft <ans>41</ans> in a block that the prompt opened</think><ans>42</ans>", 42, (1.0, 0.2)),
        ("<think><think>a</think><ans>41</ans></think><ans>42</ans>", 42, (1.0, 0.2)),
        ("<an<think></think>s>42</ans>", 42, (0.0, 0.0)),  # cutting a block must not build a tag
        ("<ans>4<think></think>2</ans>", 42, (0.0, 0.0)),  # nor a number
        ("<ans>\u00a042</ans>", 42, (0.0, 0.0)),  # white space is ASCII, as digits are
        ("<ans>--42</ans>", 42, (0.0, 0.0)),
        ("<ans>- 42</ans>", -42, (0.0, 0.0)),
        ("<ans>" + "0" * 5000 + "42</ans>", 42, (1.0, 0.2)),
    ],
)
def test_more_of_each_kind(text, target, expected):
    assert score(text, target) == expected


@given(TEXTS, st.integers())
def test_any_text_scores(text, target):
    correctness, form = score(text, target)
    assert correctness in (0.0, 1.0) and form in (0.0, 0.2)


@given(st.integers(), st.integers(), st.sampled_from(["", " ", "\n\t"]), st.text(alphabet="abc 123.=+", max_size=20))
def test_the_number_in_the_tag_decides(answer, target, space, around):
    text = f"{around}<ans>{space}{answer}{space}</ans>{around}"
    assert score(text, target) == (float(answer == target), 0.2)


@given(TEXTS, st.integers(-99, 99))
def test_a_draft_never_changes_the_score(text, target):
    draft = "<think>" + text.replace("<think>", "").replace("</think>", "") + "</think>"
    assert score(f"{draft}<ans>{target}</ans>", target) == (1.0, 0.2)


@given(TEXTS, st.integers(-99, 99))
def test_every_shape_of_a_completion_scores_alike(text, target):
    half = len(text) // 2
    shapes = [
        text,
        [{"role": "assistant", "content": text}],
        [{"role": "assistant", "content": "earlier"}, {"role": "assistant", "content": text}],
        [{"role": "assistant", "content": [{"type": "text", "text": text}]}],
        [{"role": "assistant", "content": [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}]}],
    ]
    assert len({score(shape, target) for shape in shapes}) == 1


@pytest.mark.parametrize("empty", ["", [], None, [{"role": "assistant"}], [{"role": "assistant", "content": None}],
                                   [{"role": "assistant", "content": []}], [{"content": [{"type": "image"}]}]])  # fmt: skip
def test_no_text_earns_nothing(empty):
    assert score(empty, 42) == (0.0, 0.0)


@given(st.lists(TEXTS, max_size=5))
def test_one_plain_finite_float_a_completion(texts):
    extra = {"completion_ids": [[0]] * len(texts), "trainer_state": None, "log_metric": print, "unheard_of": 1}
    for reward in task.REWARDS:
        values = reward(prompts=[None] * len(texts), completions=texts, target=[42] * len(texts), **extra)
        assert type(values) is list and len(values) == len(texts)
        assert all(type(value) is float and math.isfinite(value) for value in values)


def test_target_must_be_there_and_match():
    with pytest.raises(ValueError, match="column 'target'.*no such column"):
        task.correctness_reward(prompts=[None], completions=["<ans>1</ans>"])
    with pytest.raises(ValueError, match="3 targets for 1 completions"):
        task.correctness_reward(prompts=[None], completions=["<ans>1</ans>"], target=[1, 2, 3])


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<ans>", "<ans>1", "<ans> ", " ", "</ans>", "<think></think>"])
def test_long_text_takes_no_long_time(piece):
    start = time.perf_counter()
    score(piece * 20_000, 42)
    assert time.perf_counter() - start < 2  # 0.1 s or less; quadratic time would be minutes


def test_examples_hold():
    for example in task.EXAMPLES:
        assert list(score(example["completion"], example["target"])) == example["rewards"]


def operands(row):
    question = row["prompt"][-1]["content"]
    return task.pair(*(int(number) for number in question.removeprefix("What is ").removesuffix("?").split(" + ")))


def shown_pairs(row):
    questions = [m["content"] for m in row["prompt"][:-1] if m["role"] == "user"]
    return {operands({"prompt": [{"content": question}]}) for question in questions}


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([20, 50, 999]), st.integers(0, 3))
def test_held_out_problems_are_never_seen(seed, other_seed, max_operand, worked_examples):
    train = task.make_rows(100, seed, "train", max_operand, worked_examples)
    held_out = task.make_rows(40, other_seed, "held-out", max_operand, worked_examples)
    seen = {operands(row) for row in train}.union(*(shown_pairs(row) for row in train + held_out))
    asked = [operands(row) for row in held_out]
    assert len(set(asked)) == 40 and not seen & set(asked)


@given(st.integers(0, 99))
def test_a_worked_example_never_answers_its_question(seed):
    for row in task.make_rows(50, seed, "train", max_operand=4, worked_examples=2):
        assert operands(row) not in shown_pairs(row)


def test_rows_are_the_problems_they_say():
    rows = task.make_rows(200, seed=0)
    assert rows == task.make_rows(200, seed=0) != task.make_rows(200, seed=1)
    for row in rows:
        system, user = row["prompt"]
        assert (system["role"], system["content"], user["role"]) == ("system", task.SYSTEM, "user")
        assert sum(operands(row)) == row["target"] and 0 <= min(operands(row)) and max(operands(row)) <= 999


def test_worked_examples_are_right_and_in_the_form_that_is_paid():
    for row in task.make_rows(20, worked_examples=2):
        turns = row["prompt"][1:-1]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
        for question, answer in zip(turns[::2], turns[1::2]):
            assert score(answer["content"], sum(operands({"prompt": [question]}))) == (1.0, 0.2)


def test_too_few_pairs_are_refused():
    with pytest.raises(ValueError, match="operands up to 3 give only [0-9] held-out pairs"):
        task.make_rows(64, split="held-out", max_operand=3)
    with pytest.raises(ValueError, match='it is "train" or "held-out"'):
        task.make_rows(1, split="test")


@pytest.mark.parametrize("target", [4.5, 42.0, "42", None, True])
def test_a_target_that_is_no_integer_is_refused(target):
    with pytest.raises(TypeError, match="row 1: target .* must be an int"):
        task.to_dataset([{"prompt": [], "target": 1}, {"prompt": [], "target": target}])


def test_importing_the_task_is_light():
    code = "import sys, task; print([m for m in ('torch', 'datasets', 'transformers', 'numpy', 'pandas') if m in sys.modules])"
    root = Path(task.__file__).parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout.strip() == "[]"
