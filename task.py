"""The task: sums of two whole numbers, the result between <ans> and </ans>. It can be checked exactly, so learning shows.

A task file is three names, and `train.py --task your_file.py` runs any file that has them:

    make_dataset(n, seed=0, split="train")    n problems as a datasets.Dataset: a column `prompt` (chat messages), and
                                              whatever columns the rewards read; split is "train" or "held-out"
    REWARDS                                   a list of reward functions with TRL's signature
    EXAMPLES                                  completions, their columns, and the rewards that they must get, in the
                                              order of REWARDS: checked before every run

Nothing heavy is imported with this file, so its tests run in a second.
"""

import random
import re
import zlib

SYSTEM = (
    "Add the two numbers. A few words of working are welcome; close with the sum as one plain integer "
    "between <ans> and </ans>, as in <ans>42</ans>."
)

# ASCII digits alone: int() would also take full-width digits, underscores and a plus sign.
ANSWER = re.compile(r"<ans>\s*(-?\d+)\s*</ans>", re.ASCII)

# A block of reasoning, up to its end or, where it is never closed, to the end of the text.
REASONING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


def make_dataset(n, seed=0, split="train", max_operand=999, worked_examples=0, system=SYSTEM):
    """n addition problems as a `datasets.Dataset` with the columns `prompt` (chat messages) and `target` (int).

    Operands run from 0 to `max_operand`. `worked_examples` is the number of answered turns before the question: a
    135 M model needs one to see the form. Training problems are drawn with replacement. Held-out problems are
    distinct, and share no pair of operands, in either order, with a training problem or with any worked example,
    whatever the two seeds are. Raises ValueError where `max_operand` leaves too few pairs for that.
    """
    return to_dataset(make_rows(n, seed, split, max_operand, worked_examples, system))


def to_dataset(rows):
    """Rows as a `datasets.Dataset`. Raises TypeError for a `target` that is not an int: it could never be matched."""
    for i, row in enumerate(rows):
        if type(row["target"]) is not int:
            raise TypeError(f"row {i}: target {row['target']!r} is {type(row['target']).__name__}; it must be an int")
    from datasets import Dataset

    return Dataset.from_list(rows)


def make_rows(n, seed=0, split="train", max_operand=999, worked_examples=0, system=SYSTEM):
    """The rows of `make_dataset`, as plain dictionaries."""
    if split not in ("train", "held-out"):
        raise ValueError(f'split {split!r}: it is "train" or "held-out"')
    rng = random.Random(f"{seed} {split}")
    used, rows = set(), []
    for _ in range(n):
        a, b = draw(rng, max_operand, split, used if split == "held-out" else ())
        used.add(pair(a, b))
        shown = {pair(a, b)}  # an example never gives away its own question
        messages = [{"role": "system", "content": system}] if system else []
        for _ in range(worked_examples):
            c, d = draw(rng, max_operand, "train", shown)
            shown.add(pair(c, d))
            messages += [
                {"role": "user", "content": f"What is {c} + {d}?"},
                {"role": "assistant", "content": f"{c} + {d} = {c + d}. <ans>{c + d}</ans>"},
            ]
        rows.append({"prompt": [*messages, {"role": "user", "content": f"What is {a} + {b}?"}], "target": a + b})
    return rows


def pair(a, b):
    """The two operands in order of size, so that a + b and b + a are one problem."""
    return min(a, b), max(a, b)


def is_held_out(a, b):
    """A fixed third of all pairs, chosen by checksum, is kept for evaluation: no seed can move a pair across."""
    return zlib.crc32("{}+{}".format(*pair(a, b)).encode()) % 3 == 0


def draw(rng, max_operand, split, used):
    """Two operands of the split whose pair is not in `used`; ValueError when there seem to be none left."""
    for _ in range(1000 * (len(used) + 1)):
        a, b = rng.randint(0, max_operand), rng.randint(0, max_operand)
        if is_held_out(a, b) == (split == "held-out") and pair(a, b) not in used:
            return a, b
    raise ValueError(f"operands up to {max_operand} give only {len(used)} {split} pairs: raise max_operand or ask for fewer")


def correctness_reward(prompts, completions, target=None, **kwargs):
    """1.0 where the first well-formed tag holds the target, else 0.0; one float for each completion.

    `target` is the data set's column of ints. Raises ValueError without it, or where the lengths differ.
    """
    if target is None or len(target) != len(completions):
        got = "no such column" if target is None else f"{len(target)} targets for {len(completions)} completions"
        raise ValueError(f"correctness_reward reads the data set's column 'target', one int a completion: got {got}")
    return [float(parse_answer(text_of(c)) == str(t)) for c, t in zip(completions, target)]


def format_reward(prompts, completions, **kwargs):
    """0.2 where the completion has one well-formed tag and no other opening or closing tag, else 0.0."""
    texts = [without_reasoning(text_of(c)) for c in completions]
    return [0.2 if ANSWER.search(t) and t.count("<ans>") == t.count("</ans>") == 1 else 0.0 for t in texts]


def parse_answer(text):
    """The first well-formed answer in normal form ("0042" is "42", "-0" is "0"), or None.

    The answer stays text: int() refuses more than 4,300 digits, and a reward must not raise, whatever the model says.
    """
    found = ANSWER.search(without_reasoning(text))
    if not found:
        return None
    digits = found[1].lstrip("-").lstrip("0") or "0"
    return f"-{digits}" if found[1].startswith("-") and digits != "0" else digits


def without_reasoning(text):
    """The text outside <think>…</think>: a draft earns nothing, and a block left open hides all that follows.

    Some templates open the block in the prompt, so a closing tag alone ends one too.
    """
    return REASONING.sub(" ", text).rpartition("</think>")[2]


def text_of(completion):
    """The text of a completion in any form that TRL hands over; "" where there is none.

    A string, or a list of messages whose last one counts; a message's content is a string, a list of text parts, or None.
    """
    if isinstance(completion, list):
        completion = completion[-1] if completion else ""
    if isinstance(completion, dict):
        completion = completion.get("content")
    if isinstance(completion, list):
        parts = [p.get("text") if isinstance(p, dict) else p for p in completion]
        completion = "".join(p for p in parts if isinstance(p, str))
    return completion if isinstance(completion, str) else ""


REWARDS = [correctness_reward, format_reward]

EXAMPLES = [
    {"completion": "12 + 30 = 42. <ans>42</ans>", "target": 42, "rewards": [1.0, 0.2]},
    {"completion": "<ans>41</ans>", "target": 42, "rewards": [0.0, 0.2]},
    {"completion": "<ans>42</ans>, or <ans>43</ans>", "target": 42, "rewards": [1.0, 0.0]},
    {"completion": "The answer is 42.", "target": 42, "rewards": [0.0, 0.0]},
    {"completion": "<think>perhaps <ans>42</ans></think>", "target": 42, "rewards": [0.0, 0.0]},
]
