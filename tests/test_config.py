"""What is refused: each mistake through the script, as a user would make it, and the rules that need a card's data."""

import textwrap

import pytest

from checks import Refused, check_gpu
from conftest import refused, train
from gpu import Gpu
from train import PRESETS

TASK = """
from task import EXAMPLES, make_dataset
def good(completions, **kwargs):
    return [1.0 if "42" in c[-1]["content"] else 0.0 for c in completions]
EXAMPLES = [{"completion": "42", "rewards": [1.0]}, {"completion": "", "rewards": [0.0]}]
REWARDS = [good]
"""


def test_help_is_quick_and_names_the_knobs(tmp_path):
    done = train("--help", cwd=tmp_path)
    assert done.code == 0 and done.seconds < 3
    for flag in ("--num-generations", "--max-completion-length", "--epsilon-high", "--preset", "--vram-limit-gib"):
        assert flag in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--num-generations 1", ["--num-generations 1", "2 is the least"]),
        ("--num-generations 5", ["8 x ", "groups of 5", "nearest batch sizes: 5 or 10"]),
        (
            "--num-generations 4 --per-device-train-batch-size 3 --gradient-accumulation-steps 2",
            ["3 x ", "= 6 completions", "nearest batch sizes: 2 or 4"],
        ),
        ("--per-device-train-batch-size 2", ["nearest batch sizes: 8"]),
        ("--per-device-train-batch-size 16 --train-problems 1", ["--train-problems 1", "takes 2 problems"]),
        ("--train-problems 0", ["--train-problems 0", "at least 1"]),
        ("--max-steps 0", ["--max-steps 0", "at least 1"]),
        ("--temperature 0", ["--temperature 0.0", "positive"]),
        ("--learning-rate nan", ["--learning-rate nan", "0 or a positive number"]),
        ("--beta -0.1", ["--beta -0.1", "0 or a positive number"]),
        ("--top-p 1.5", ["--top-p 1.5", "at most 1"]),
        ("--seed -1", ["--seed -1"]),
        ("--lora-r 1024", ["--lora-r 1024", "512"]),
        ("--loss-type luspo", ["--loss-type luspo", "--importance-sampling-level sequence"]),
        ("--loss-type cispo", ["--loss-type cispo", "--epsilon-high 5"]),
        ("--preset qwen3-4b", ["--preset qwen3-4b", "CUDA GPU", "--preset smollm2", "--no-fast-inference"]),
        ("--fast-inference", ["vLLM", "CUDA GPU", "--no-fast-inference"]),
        ("--vram-limit-gib 15", ["--vram-limit-gib 15", "no GPU"]),
        ("--gpu-memory-utilization 0.5", ["--gpu-memory-utilization 0.5", "no GPU"]),
        ("--model nowhere", ["--model nowhere", "no such folder", "smollm2-135m-instruct"]),
        ("--model ./nowhere", ["--model ./nowhere", "no such folder"]),
        ("--model .", ["--model .", "no config.json"]),
        ("--output-dir file/in/it", ["--output-dir file/in/it", "Not a directory"]),
        ("--task nowhere.py", ["nowhere.py", "no such Python file"]),
        ("--max-operand 3", ["held-out", "operands up to 3"]),
    ],
)
def test_config_is_refused_at_once(arguments, words, tmp_path):
    (tmp_path / "file").write_text("")
    message = refused(*arguments.split(), cwd=tmp_path)
    for word in words:
        assert word in message
    assert not list(tmp_path.glob("outputs/*"))


@pytest.mark.parametrize("arguments", ["--loss-type nope", "--max-step 3", "--max-steps many", "--max-steps", "--preset nope"])
def test_words_that_are_no_config_are_refused(arguments, tmp_path):
    done = train(*arguments.split(), cwd=tmp_path)
    assert done.code == 2 and done.seconds < 3 and "Traceback" not in done.stderr
    assert arguments.split()[0] in done.stderr


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise OSError('no words file')", ["OSError: no words file"]),
        ("def broken(:", ["SyntaxError"]),
        ("del REWARDS", ["lacks REWARDS"]),
        ("REWARDS = []", ["REWARDS is []"]),
        ("REWARDS = [lambda completions, **kwargs: [0.0] * len(completions)]", ["<lambda>", "name of its own"]),
        ("REWARDS = [good, good]\nEXAMPLES = [{'completion': '', 'rewards': [0.0, 0.0]}]", ["name of its own"]),
        ("EXAMPLES = []", ["EXAMPLES is []"]),
        ("EXAMPLES = [{'completion': 'x'}]", ["`rewards`"]),
        ("EXAMPLES = [{'completion': '42', 'rewards': [1.0, 0.2]}]", ["rewards for 2"]),
        ("EXAMPLES = [{'completion': '42', 'rewards': [0.5]}]", ["good gives 1.0 for '42'", "0.5"]),
        ("def good(completions, **kwargs): return [1.0]\nREWARDS = [good]", ["good returned 1 values for 2"]),
        ("def good(completions, **kwargs): return [None, 0.0]\nREWARDS = [good]", ["good returned None (NoneType)"]),
        ("def good(completions, **kwargs): return [float('nan'), 0.0]\nREWARDS = [good]", ["good returned nan (float)"]),
        ("import array\ndef good(completions, **kwargs): return array.array('d', [1.0, 0.0])\nREWARDS = [good]",
         ["good returned array('d', [1.0, 0.0]), a array"]),
        ("import numpy\ndef good(completions, **kwargs): return list(numpy.ones((2, 1)))\nREWARDS = [good]",
         ["good returned array([1.]) (ndarray)"]),
        ("def good(completions, **kwargs): return completions[9]\nREWARDS = [good]", ["good raised IndexError"]),
        ("async def good(completions, **kwargs): return [0.5, 0.0]\nREWARDS = [good]", ["good gives 0.5 for '42'"]),
        ("def good(completions, answer, **kwargs): return [1.0, 0.0]\nREWARDS = [good]", ["good raised TypeError", "answer"]),
        ("def make_dataset(n, seed, split): return [{'prompt': 'hi'}] * n", ["not a datasets.Dataset"]),
        ("def make_dataset(n): return 1", ["make_dataset(512, seed=0, split='train') raised TypeError"]),
    ],
)  # fmt: skip
def test_task_is_refused_with_the_name_and_the_value(code, words, tmp_path):
    (tmp_path / "my_task.py").write_text(textwrap.dedent(TASK) + code)
    message = refused("--task", "my_task.py", cwd=tmp_path)
    for word in words:
        assert word in message


def test_an_option_that_the_task_does_not_take_is_refused(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK + "def make_dataset(n, seed, split): raise RuntimeError('reached')")
    assert "--worked-examples 3" in refused("--task", "my_task.py", "--worked-examples", "3", cwd=tmp_path)
    # the preset's own options are no request of the user's
    assert "RuntimeError: reached" in refused("--task", "my_task.py", cwd=tmp_path)


def card(**changes):
    values = {"uuid": "GPU-0", "cuda_name": "0", "name": "NVIDIA GeForce RTX 5080", "driver": "580.65.06", "total_gib": 15.9,
              "compute_capability": (12, 0)}  # fmt: skip
    return Gpu(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "limit", "words"),
    [
        ({"driver": "575.57.08"}, None, "driver 575.57.08: the locked torch needs 580"),
        ({"compute_capability": (7, 5), "name": "Tesla T4"}, None, "Tesla T4: compute capability 7.5, and bf16 needs 8.0"),
        ({}, 24.0, "--vram-limit-gib 24: the card has 15.9 GiB"),
    ],
)
def test_card_is_refused(changes, limit, words):
    import dataclasses

    config = dataclasses.replace(PRESETS["qwen3-4b"], vram_limit_gib=limit)
    with pytest.raises(Refused, match=words):
        check_gpu(config, card(**changes))
    check_gpu(PRESETS["qwen3-4b"], card())
