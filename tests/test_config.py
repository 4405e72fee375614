"""What is refused: each mistake through the script, as a user would make it, and the rules that need a card's data."""

import asyncio
import dataclasses
import inspect
import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pynvml
import pytest

import budget
import checkpoints
import checks
import command_line
from checks import Refused, check_gpu
from conftest import ROOT, refused, refused_in_this_process, train
from data import in_order
from engine import check as check_engine
from engine import fewer_seats, memory_plan, vllm_arguments
from gpu import Gpu, find_gpu
from train import PRESETS, Config

TASK = """
from task import EXAMPLES, make_dataset
def good(completions, **kwargs):
    return [1.0 if "42" in c[-1]["content"] else 0.0 for c in completions]
EXAMPLES = [{"completion": "42", "rewards": [1.0]}, {"completion": "", "rewards": [0.0]}]
REWARDS = [good]
"""


def test_help_is_quick_and_names_the_knobs(tmp_path):
    done = train("--help", cwd=tmp_path)
    assert done.code == 0 and done.seconds < 5
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
        ("--steps-per-generation 0", ["--steps-per-generation 0", "whole optimizer steps of 1 passes", ": 1, or None"]),
        ("--steps-per-generation -8", ["--steps-per-generation -8", ": 1, or None"]),
        (
            "--steps-per-generation 6 --gradient-accumulation-steps 4",
            ["--steps-per-generation 6", "of 4 passes (--gradient-accumulation-steps): 4 or 8, or None for one step"],
        ),
        ("--steps-per-generation 1 --gradient-accumulation-steps 4", ["--steps-per-generation 1", ": 4, or None"]),
        (
            "--steps-per-generation 8 --train-problems 7",
            ["--train-problems 7", "one rollout (--steps-per-generation 8) takes 8 problems"],
        ),
        ("--run-name=", ["--run-name ''", "it is not empty and has no slash"]),
        ("--experiment=", ["--experiment ''", "without the flag it is p7-grpo"]),
        ("--output-dir=", ["--output-dir ''", "without the flag it is outputs"]),
        ("--run-name a\udcff", ["--run-name 'a\\udcff'", "give a name in UTF-8"]),
        ("--output-dir o\udcff", ["--output-dir 'o\\udcff'", "give a name in UTF-8"]),
        ("--use-cuda-graph", ["--use-cuda-graph", "--backend paged"]),
        ("--backend paged --use-cuda-graph", ["--use-cuda-graph: there is no GPU"]),
        ("--max-completion-length 8100", ["--max-completion-length 8100", "8192 tokens", "; --max-completion-length 8064"]),
        ("--max-prompt-length 9000", ["--max-prompt-length 9000", "8192 tokens", "a --max-prompt-length below 8192"]),
        ("--no-fast-inference", ["--no-fast-inference: it is --backend unsloth now"]),
        ("--min-p 2", ["--min-p 2.0", "a share, above 0 and at most 1"]),
        ("--vllm-enable-sleep-mode", ["--vllm-enable-sleep-mode", "--backend vllm"]),
        ("--train-problems 0", ["--train-problems 0", "at least 1"]),
        ("--max-steps 0", ["--max-steps 0", "at least 1"]),
        ("--temperature 0", ["--temperature 0.0", "positive"]),
        ("--learning-rate nan", ["--learning-rate nan", "0 or a positive number"]),
        ("--beta -0.1", ["--beta -0.1", "0 or a positive number"]),
        ("--top-p 1.5", ["--top-p 1.5", "at most 1"]),
        ("--run-name ../x", ["--run-name '../x'", "no slash"]),
        ("--optim adamw_8bit", ["--optim adamw_8bit", "--optim adamw_torch_fused"]),
        ("--seed -1", ["--seed -1"]),
        ("--seed 99999999999", ["--seed 99999999999", "4294967296"]),
        ("--sample-steps -1", ["--sample-steps -1"]),
        ("--worked-examples -1", ["--worked-examples -1"]),
        (f"--run-name {'x' * 300}", ["--run-name of 300 bytes", "at most 200"]),
        ("--save-total-limit 0", ["--save-total-limit 0", "at least 1"]),
        ("--eval-steps 5 --eval-problems 0", ["--eval-steps 5", "--eval-problems 0"]),
        ("--resume-from-checkpoint last", ["--resume-from-checkpoint last", "no whole checkpoint below outputs"]),
        ("--resume_from_checkpoint=nowhere", ["--resume-from-checkpoint nowhere", "no such folder"]),
        ("--lora-r 1024", ["--lora-r 1024", "512"]),
        ("--loss-type luspo", ["--loss-type luspo", "--importance-sampling-level sequence"]),
        ("--loss-type cispo", ["--loss-type cispo", "--epsilon-high 5"]),
        ("--preset qwen3-4b", ["--preset qwen3-4b", "CUDA GPU", "--preset smollm2", "--backend unsloth"]),
        ("--backend vllm", ["vLLM", "CUDA GPU", "--backend unsloth"]),
        ("--vram-limit-gib 15", ["--vram-limit-gib 15", "no GPU"]),
        ("--gpu-memory-utilization 0.5", ["--gpu-memory-utilization 0.5", "--backend vllm"]),
        ("--vllm-importance-sampling-correction", ["--vllm-importance-sampling-correction", "--backend vllm"]),
        ("--load-in fp8", ["--load-in fp8", "--backend vllm on a GPU", "--load-in 4bit or 16bit"]),
        ("--kv-cache-dtype fp8", ["--kv-cache-dtype fp8", "--backend vllm"]),
        ("--load-in-4bit", ["--load-in-4bit: it is --load-in 4bit now", "it is --load-in 4bit now"]),
        ("--no_load_in_4bit --max-steps 3", ["--no_load_in_4bit: it is --load-in 16bit now"]),
        ("--model nowhere", ["--model nowhere", "no such folder", "smollm2-135m-instruct"]),
        ("--model ./nowhere", ["--model ./nowhere", "no such folder"]),
        ("--model .", ["--model .", "no config.json"]),
        ("--output-dir file/in/it", ["--output-dir file/in/it", "Not a directory"]),
        ("--task nowhere.py", ["nowhere.py", "no such Python file"]),
        ("--max-operand 3", ["held-out", "operands up to 3"]),
        ("--max-steps 99999999999", ["--max-steps 99999999999: at most 1000000"]),
    ],
)
def test_config_is_refused_at_once(arguments, words, tmp_path):
    (tmp_path / "file").write_text("")
    message = refused(*arguments.split(), cwd=tmp_path)
    for word in words:
        assert word in message


def test_help_into_a_pipe_that_closes(tmp_path):
    shell = f'"{sys.executable}" "{ROOT / "train.py"}" --help | head -1'
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("usage: train.py") and done.stderr == ""


def test_a_cache_that_cannot_be_written_is_refused_at_once(tmp_path):
    """Only where the embedded model has yet to be unpacked into it."""
    cache = tmp_path / "file"
    cache.write_text("")
    said = refused("--preset", "smollm2", cwd=tmp_path, XDG_CACHE_HOME=str(cache))
    assert said == f"train.py: the cache folder {cache / 'grpo-lab'} cannot be written (Not a directory); set XDG_CACHE_HOME\n"


def test_a_wrong_config_comes_back_before_any_heavy_import(tmp_path):
    assert min(train("--num-generations", "5", cwd=tmp_path).seconds for _ in range(2)) < 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--loss-type nope", ["'nope'", "--loss-type", "'dr_grpo'"]),
        ("--optim nope", ["'nope'", "--optim", "'adamw_torch_fused'"]),
        ("--max-step 3", ["--max-step", "Perhaps you meant: --max-steps"]),
        ("--max-steps many", ["--max-steps", "'many'"]),
        ("--max-steps", ["Missing value", "--max-steps"]),
        ("--preset nope", ["'nope'", "'qwen3-4b', 'chapter', 'smollm2'"]),
        ("--preset", ["--preset"]),
        ("surplus", ["surplus"]),
    ],
)
def test_words_that_are_no_config_are_refused_in_one_line(arguments, words, tmp_path):
    message = refused(*arguments.split(), cwd=tmp_path, COLUMNS="80")
    assert len(message.splitlines()) == 1 and "│" not in message and "─" not in message
    for word in words:
        assert word in message


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
        ("EXAMPLES = [{'completion': '42', 'rewards': [1.0, 0.2]}]", ["`rewards` as a list of 1"]),
        ("EXAMPLES = [{'completion': '42', 'rewards': [0.5]}]", ["good gives 1.0 for '42'", "0.5"]),
        ("def good(completions, **kwargs): return [1.0]\nREWARDS = [good]", ["good returned 1 values for 2"]),
        ("def good(completions, **kwargs): return [None, 0.0]\nREWARDS = [good]", ["good returned None (NoneType)"]),
        ("def good(completions, **kwargs): return [float('nan'), 0.0]\nREWARDS = [good]", ["good returned nan (float)"]),
        ("class Tensor:\n  def __repr__(self): return 'tensor([1., 0.])'\n"
         "def good(completions, **kwargs): return Tensor()\nREWARDS = [good]", ["good returned tensor([1., 0.]), a Tensor"]),
        ("import numpy\ndef good(completions, **kwargs): return list(numpy.ones((2, 1)))\nREWARDS = [good]",
         ["good returned array([1.]) (ndarray)"]),
        ("def good(completions, **kwargs): return completions[9]\nREWARDS = [good]", ["good raised IndexError"]),
        ("async def good(completions, **kwargs): return [0.5, 0.0]\nREWARDS = [good]", ["good gives 0.5 for '42'"]),
        ("def good(completions, answer, **kwargs): return [1.0, 0.0]\nREWARDS = [good]", ["good raised TypeError", "answer"]),
        ("def make_dataset(n, seed, split): return [{'prompt': 'hi'}] * n", ["not a datasets.Dataset"]),
        ("import sys\nsys.exit(0)", ["SystemExit"]),
        ("make_dataset = None", ["make_dataset is None"]),
        ("def make_dataset(n, seed, split):\n  raise SystemExit(0)", ["SystemExit"]),
        ("EXAMPLES = [{'completion': '42', 'rewards': 0.5}]", ["`rewards` as a list of 1"]),
        ("EXAMPLES = [{'completion': '42', 'rewards': [None]}]", ["`rewards` as a list of 1"]),
        ("EXAMPLES = [{'completion': '42', 'w': 1, 'rewards': [1.0]}]", ["examples have ['w']", "data set lacks"]),
        ("def good(completions, **kwargs): return [10**400, 0]\nREWARDS = [good]", ["good returned 1000000"]),
        ("from datasets import Dataset\ndef make_dataset(n, seed, split): return Dataset.from_list([{'prompt': 7}] * n)",
         ["prompt 7 must be text"]),
        ("def make_dataset(n): return 1", ["make_dataset(512, seed=0, split='train') raised TypeError"]),
    ],
)  # fmt: skip
def test_task_is_refused_with_the_name_and_the_value(code, words, tmp_path):
    (tmp_path / "my_task.py").write_text(textwrap.dedent(TASK) + code)
    message = refused_in_this_process("--task", "my_task.py", cwd=tmp_path)
    for word in words:
        assert word in message


def test_an_option_that_the_task_does_not_take_is_refused(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK + "def make_dataset(n, seed, split): raise RuntimeError('reached')")
    assert "--worked-examples 3" in refused("--task", "my_task.py", "--worked-examples", "3", cwd=tmp_path)
    (tmp_path / "my_task.py").write_text(TASK + "def make_dataset(n, seed, split, **more): raise RuntimeError(more)")
    assert "{'max_operand': 20, 'worked_examples': 3" in refused("--task", "my_task.py", "--worked-examples", "3", cwd=tmp_path)
    (tmp_path / "my_task.py").write_text(TASK + "def make_dataset(n, seed, split): raise RuntimeError('reached')")
    # the preset's own options are no request of the user's
    assert "RuntimeError: reached" in refused("--task", "my_task.py", cwd=tmp_path)


def test_a_reward_gets_what_trl_hands_over(tmp_path):
    code = """
def good(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, target, **kwargs):
    assert trainer_state.global_step == 0 and len(completion_ids) == len(completions) == len(target)
    log_extra("column", completions)
    log_metric("metric", 1.0)
    return [7.0] * len(completions)
EXAMPLES = [{"completion": "42", "target": 42, "rewards": [1.0]}]
REWARDS = [good]
"""
    (tmp_path / "my_task.py").write_text(textwrap.dedent(TASK) + code)
    assert "good gives 7.0 for '42', and its example says 1.0" in refused("--task", "my_task.py", cwd=tmp_path)


@pytest.mark.parametrize("kind", ["numpy.float32([1.0, 0.0])", "[True, False]", "[1, 0]"])
def test_rewards_that_trl_takes_are_taken(kind, tmp_path):
    """Not refused for the values' type: the next thing that is wrong is what the message is about."""
    code = (
        f"import numpy\ndef good(completions, **kwargs): return list({kind})\nREWARDS = [good]\nEXAMPLES[0]['rewards'] = [7.0]"
    )
    (tmp_path / "my_task.py").write_text(textwrap.dedent(TASK) + code)
    assert "its example says 7.0" in refused("--task", "my_task.py", cwd=tmp_path)


def test_a_task_of_plain_strings_gets_plain_strings(tmp_path):
    code = """
from datasets import Dataset
def make_dataset(n, seed, split):
    return Dataset.from_list([{"prompt": "say 42"}] * n)
def good(prompts, completions, **kwargs):
    assert prompts[0] == "say 42" and prompts[1] == "mine"
    return [float(text.startswith("42")) for text in completions]
REWARDS = [good]
EXAMPLES = [{"completion": "42", "rewards": [1.0]}, {"prompt": "mine", "completion": "42", "rewards": [7.0]}]
"""
    (tmp_path / "my_task.py").write_text(code)
    assert "good gives 1.0 for '42', and its example says 7.0" in refused("--task", "my_task.py", cwd=tmp_path)


def test_a_task_hides_none_of_the_labs_modules(tmp_path):
    (tmp_path / "data.py").write_text(textwrap.dedent(TASK) + "EXAMPLES[0]['rewards'] = [7.0]")
    (tmp_path / "record.py").write_text("raise RuntimeError('the wrong one')")
    assert "its example says 7.0" in refused("--task", "data.py", cwd=tmp_path)


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
    config = dataclasses.replace(PRESETS["qwen3-4b"], vram_limit_gib=limit)
    with pytest.raises(Refused, match=words):
        check_gpu(config, card(**changes))
    check_gpu(PRESETS["qwen3-4b"], card())


@pytest.fixture
def qwen3_4b(tmp_path):
    """A folder with Qwen3-4B's shape, as its config.json gives it."""
    shape = dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                 num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **shape}))
    return tmp_path


def test_engine_holds_weights_adapter_and_cache(qwen3_4b):
    # 3.633 B weights in linear layers, 0.389 B in the tied embedding, 33 M in the adapter
    def held(**changes):
        """GiB in vLLM's share, and without the cache."""
        config = dataclasses.replace(PRESETS["chapter"], force=True, **changes)
        plan = memory_plan(config, card(), str(qwen3_4b), 15.2)[1]
        assert plan["kv_cache"].gib == config.kv_cache_gib
        return plan.share_gib, plan.share_gib - config.kv_cache_gib

    # vLLM's slot also has room for embedding, head and logits; its activations and what it holds itself are estimated
    slot = (33.03e6 + 16 * 3 * (151936 + 2560)) * 2 / 2**30
    total, without_cache = held(load_in="16bit")
    assert without_cache - 4.0224e9 * 2 / 2**30 - slot == pytest.approx(0.3, abs=0.05)
    assert held(load_in="16bit", kv_cache_gib=3.75)[0] == pytest.approx(total + 1.25)
    nf4 = 1 / 2 + 1 / 64 + 4 / (64 * 256)
    in_4bit = held()[1]
    assert without_cache - in_4bit == pytest.approx(3.6333e9 * (2 - nf4) / 2**30, rel=1e-3)
    config = json.loads((qwen3_4b / "config.json").read_text())
    nested = {"quant_method": "bitsandbytes", "bnb_4bit_use_double_quant": True}
    config["quantization_config"] = {**nested, "llm_int8_skip_modules": ["lm_head", "model.layers.3.mlp"]}
    (qwen3_4b / "config.json").write_text(json.dumps(config))
    assert held()[1] - in_4bit == pytest.approx(3 * 2560 * 9728 * (2 - nf4) / 2**30, rel=1e-3)


def test_share_is_of_what_is_free_and_leaves_room_for_training(qwen3_4b):
    config = PRESETS["chapter"]

    def share(config, gpu, free, free_later):
        shape, plan = memory_plan(config, gpu, str(qwen3_4b), free)
        assert plan.total_gib > plan.share_gib + plan["activations"].gib
        return vllm_arguments(config, shape, plan, gpu, free_later), plan.share_gib

    arguments, engine = share(config, card(), 15.2, 14.6)
    assert arguments["gpu_memory_utilization"] == pytest.approx(engine / 14.6)
    assert (arguments["max_lora_rank"], arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == (16, 16, 2048)
    # a limit leaves the engine as large, though the card has more free
    limited = dataclasses.replace(config, vram_limit_gib=15.0)
    arguments, of_limited = share(limited, card(total_gib=139.8), 139.0, 138.4)
    assert of_limited == engine and arguments["gpu_memory_utilization"] == pytest.approx(engine / 138.4)
    # a share that is given counts from the limit too
    given = dataclasses.replace(limited, gpu_memory_utilization=0.4)
    arguments, _ = share(given, card(total_gib=139.8), 139.0, 138.4)
    assert arguments["gpu_memory_utilization"] == pytest.approx(0.4 * 15 / 138.4)
    # vLLM decodes the whole batch at once, and takes no fewer tokens in one pass
    many = dataclasses.replace(limited, gradient_accumulation_steps=512, force=True)
    arguments, _ = share(many, card(total_gib=139.8), 139.0, 138.4)
    assert (arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == (4096, 4096)
    # a rollout of eight groups of eight
    eight = dataclasses.replace(PRESETS["qwen3-4b"], vram_limit_gib=15.0)
    arguments, _ = share(eight, card(total_gib=139.8), 139.0, 138.4)
    assert (arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == (64, 2048)
    # 256 is Unsloth's own default, in whose place it puts a number of its own
    arguments, _ = share(dataclasses.replace(eight, steps_per_generation=32), card(total_gib=139.8), 139.0, 138.4)
    assert arguments["max_num_seqs"] == 257
    assert budget.graph_sizes(dataclasses.replace(eight, steps_per_generation=32))[-2:] == [256, 257]


@pytest.mark.parametrize(
    ("changes", "free", "words"),
    [
        (
            {"gpu_memory_utilization": 0.9},
            15.2,
            r"takes 1\d\.\d GiB and 15\.2 may be used; the largest line is KV cache, 11\.\d",
        ),
        ({"gpu_memory_utilization": 0.9}, 15.2, r"--gpu-memory-utilization 0\.\d+ \(now 0\.9\)"),
        (
            {},
            7.5,
            r"takes 8\.\d GiB and 7\.5 may be used; .*\nNearest that fits, one at a time: --kv-cache-gib 0\.\d+ \(now 2\.5\)",
        ),
        ({"vram_limit_gib": 7.5}, 15.2, r"takes 8\.\d GiB and 7\.5 may be used"),
    ],
)
def test_a_plan_that_leaves_no_room_for_training_is_refused_with_the_nearest(changes, free, words, qwen3_4b):
    config = dataclasses.replace(PRESETS["chapter"], **changes)
    with pytest.raises(Refused, match=words) as refusal:
        memory_plan(config, card(), str(qwen3_4b), free)
    assert len(str(refusal.value).splitlines()) == 2
    assert memory_plan(dataclasses.replace(config, force=True), card(), str(qwen3_4b), free)[1].headroom_gib < 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"gpu_memory_utilization": 0.16},
            r"--gpu-memory-utilization 0.16 \(2.5 GiB, with weights and all\) holds sequences of 0 tokens, and prompt and "
            r"completion take 1024.\nNearest that fits, one at a time: --gpu-memory-utilization 0.21 \(now 0.16\)$",
        ),
        (
            {"kv_cache_gib": 0.1},
            r"--kv-cache-gib 0.1 holds sequences of 0 tokens, .*\nNearest that fits, one at a time: --kv-cache-gib 0.3\d \(",
        ),
    ],
)
def test_share_too_small_for_one_sequence_is_refused_before_loading(changes, words, qwen3_4b):
    """vLLM by itself says so after loading twice. The chapter's 0.16 of 16 GB is such a share."""
    config = dataclasses.replace(PRESETS["chapter"], **changes)
    with pytest.raises(Refused, match=words):
        memory_plan(config, card(), str(qwen3_4b), 15.2)


@pytest.mark.parametrize("length", [256, 1023])
def test_an_engine_cut_to_shorter_sequences_is_refused(length):
    limits = SimpleNamespace(model_config=SimpleNamespace(max_model_len=length))
    engine = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=limits))
    with pytest.raises(Refused, match=rf"sequences of {length} tokens, and prompt and completion take 1024"):
        check_engine(engine, PRESETS["qwen3-4b"])


def test_an_engine_with_fewer_seats_than_a_rollout_says_so():
    scheduler = SimpleNamespace(max_num_seqs=48)
    engine = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(scheduler_config=scheduler)))
    said = fewer_seats(engine, PRESETS["qwen3-4b"])
    assert said == "vLLM decodes 48 sequences at once, a rollout has 64: the others wait for their turn"
    scheduler.max_num_seqs = 64
    assert fewer_seats(engine, PRESETS["qwen3-4b"]) is None


@pytest.mark.parametrize(
    ("load_in", "quantized", "expected"),
    [
        ("4bit", None, {}),
        ("16bit", None, {}),
        ("fp8", None, {"load_in_fp8": True, "use_exact_model_name": True}),
        ("fp8", "fp8", {}),  # asked for 8 bits again, vLLM would refuse
    ],
)
def test_a_16_bit_checkpoint_is_quantized_as_it_loads(load_in, quantized, expected, qwen3_4b, monkeypatch):
    """Unsloth's loader is asked for it, and its estimate told of it, in the words that it uses itself."""

    def estimate(config, load_in_4bit=False, load_in_8bit=False):
        return 8 if load_in_8bit else 16

    zoo = SimpleNamespace(vllm_weights_memory_usage=estimate)
    monkeypatch.setitem(sys.modules, "unsloth_zoo", SimpleNamespace(vllm_utils=zoo))
    monkeypatch.setitem(sys.modules, "unsloth_zoo.vllm_utils", zoo)
    config = dataclasses.replace(PRESETS["chapter"], load_in=load_in)
    shape, plan = memory_plan(config, card(), str(qwen3_4b), 15.2)
    shape = dataclasses.replace(shape, quantized=quantized)
    arguments = vllm_arguments(config, shape, plan, card(), 14.6)
    assert {name: value for name, value in arguments.items() if name in ("load_in_fp8", "use_exact_model_name")} == expected
    assert zoo.vllm_weights_memory_usage({}, load_in_4bit=False, load_in_8bit=False) == (8 if expected else 16)
    assert arguments["float8_kv_cache"] is False
    in_8_bits = dataclasses.replace(config, kv_cache_dtype="fp8")
    assert vllm_arguments(in_8_bits, shape, plan, card(), 14.6)["float8_kv_cache"] is True


@pytest.mark.parametrize(("in_4_bits", "load_in"), [(True, "4bit"), (False, "16bit")])
def test_a_checkpoint_of_before_load_in_says_what_it_was(in_4_bits, load_in, tmp_path):
    config = dataclasses.asdict(PRESETS["qwen3-4b"])
    for name in ("load_in", "kv_cache_dtype", "steps_per_generation", "lean_decode", "vllm_enable_sleep_mode"):
        del config[name]
    (tmp_path / "lab.json").write_text(json.dumps({"config": {**config, "load_in_4bit": in_4_bits}}))
    resumed = checkpoints.config_of(tmp_path, PRESETS["smollm2"])
    # it goes on as it began, whatever the preset of that name is by now
    before = {"steps_per_generation": None, "lean_decode": False}
    assert resumed == dataclasses.replace(PRESETS["qwen3-4b"], load_in=load_in, **before)
    origin = {**checkpoints.read_facts(tmp_path), "step": 0, "task_file": None}
    assert checkpoints.changes(origin, dataclasses.asdict(resumed), None) == []
    with pytest.raises(Refused, match=f"--load-in fp8: the checkpoint is of {load_in}; leave it away"):
        checkpoints.changes(origin, dataclasses.asdict(dataclasses.replace(resumed, load_in="fp8")), None)


@pytest.mark.parametrize(("fast_inference", "backend"), [(True, "vllm"), (False, "unsloth")])
def test_a_checkpoint_of_before_backend_goes_on_with_what_it_had(fast_inference, backend, tmp_path):
    config = dataclasses.asdict(PRESETS["smollm2"])
    for name in ("backend", "min_p", "use_cuda_graph", "torch_compile", "processes"):
        del config[name]
    (tmp_path / "lab.json").write_text(json.dumps({"config": {**config, "fast_inference": fast_inference}}))
    resumed = checkpoints.config_of(tmp_path, PRESETS["qwen3-4b"])
    assert resumed == dataclasses.replace(PRESETS["smollm2"], backend=backend)
    origin = {**checkpoints.read_facts(tmp_path), "step": 0, "task_file": None}
    assert checkpoints.changes(origin, dataclasses.asdict(resumed), None) == []
    with_two = dataclasses.asdict(dataclasses.replace(resumed, processes=2))
    assert checkpoints.changes(origin, with_two, None) == ["processes: 1 -> 2"]


def read_config(arguments, gpu):
    return command_line.parse(Config, PRESETS, arguments, gpu)


@pytest.mark.parametrize(
    ("changes", "rollout", "prompts", "steps"),
    [
        ({}, 64, 8, 8),
        ({"steps_per_generation": None}, 8, 1, 1),
        ({"steps_per_generation": 1}, 8, 1, 1),
        ({"num_iterations": 2}, 64, 8, 16),
        ({"steps_per_generation": None, "num_iterations": 3}, 8, 1, 3),
        # passes count, not steps: 8 of 8 answers, two to a step
        ({"gradient_accumulation_steps": 2}, 64, 8, 4),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": None}, 16, 2, 1),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 12}, 48, 6, 3),
        ({"num_generations": 16, "gradient_accumulation_steps": 2, "num_iterations": 2}, 64, 4, 8),
    ],
)
def test_what_a_rollout_is_made_of(changes, rollout, prompts, steps):
    config = dataclasses.replace(PRESETS["qwen3-4b"], **changes)
    checks.check_config(config)
    assert (config.rollout_batch, config.prompts_per_rollout, config.steps_per_rollout) == (rollout, prompts, steps)


def test_train_problems_fill_one_rollout_to_the_last():
    config = dataclasses.replace(PRESETS["qwen3-4b"], gradient_accumulation_steps=2, steps_per_generation=16)
    checks.check_config(dataclasses.replace(config, train_problems=16))
    with pytest.raises(Refused, match="--train-problems 15: one rollout .--steps-per-generation 16. takes 16 problems"):
        checks.check_config(dataclasses.replace(config, train_problems=15))


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 104),  # 13 rollouts of 8 problems for 104 steps
        ({"max_steps": 100}, 104),  # the last rollout is not used up
        ({"num_iterations": 2}, 56),  # 7 rollouts of 16 steps, the last one for 8 of them
        ({"gradient_accumulation_steps": 2}, 208),  # 26 of 4 steps
        ({"steps_per_generation": None}, 104),
        ({"train_problems": 21, "max_steps": 32}, 32),
        ({"train_problems": 8, "max_steps": 1}, 8),
    ],
)
def test_problems_come_epoch_after_epoch_in_whole_rollouts(changes, length):
    from datasets import Dataset

    config = dataclasses.replace(PRESETS["qwen3-4b"], **changes)
    problems = Dataset.from_dict({"number": range(config.train_problems)})
    order = in_order(problems, config)["number"]
    assert len(order) == length
    epoch = config.train_problems // config.prompts_per_rollout * config.prompts_per_rollout  # what fills no rollout is left
    parts = [order[i : i + epoch] for i in range(0, length, epoch)]
    assert all(len(set(part)) == len(part) for part in parts)
    assert len(parts) == 1 or parts[0] != parts[1][:epoch]
    assert order == in_order(problems, config)["number"]
    # a longer run begins as the shorter one, so that it can go on from it; another seed has another order
    longer = dataclasses.replace(config, max_steps=3 * config.max_steps)
    assert in_order(problems, longer)["number"][:length] == order
    assert in_order(problems, dataclasses.replace(config, seed=1))["number"] != order


def test_half_a_launcher_is_refused(tmp_path):
    message = refused("--preset", "smollm2", cwd=tmp_path, WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    assert "WORLD_SIZE 2 with RANK 0: these are a launcher's, and not all there" in message


def test_preset_follows_the_card_and_the_word():
    assert read_config([], None).preset == "smollm2" and read_config([], card()).preset == "qwen3-4b"
    assert read_config(["--preset=smollm2"], card()).backend == "vllm"
    assert read_config(["--preset", "smollm2"], None).backend == "unsloth"
    assert read_config(["--preset", "smollm2", "--backend", "unsloth"], card()).backend == "unsloth"
    assert read_config(["--preset", "qwen3-4b", "--load-in", "16bit"], card()).load_in == "16bit"
    assert read_config(["--preset", "chapter"], card()) == PRESETS["chapter"]
    assert read_config(["--steps-per-generation", "None"], card()).steps_per_generation is None
    assert read_config(["--preset", "smollm2", "--steps-per-generation", "4"], None).prompts_per_rollout == 4


def test_the_chapters_preset_is_the_default_but_for_what_makes_it_fast():
    chapter, default = dataclasses.asdict(PRESETS["chapter"]), dataclasses.asdict(PRESETS["qwen3-4b"])
    assert {name for name in chapter if chapter[name] != default[name]} == {
        "preset", "steps_per_generation", "kv_cache_gib", "lean_decode", "max_steps"}  # fmt: skip
    # the default's last rollout is used up, and its cache holds the answers of a rollout at 0.83 of their full length
    assert default["max_steps"] % PRESETS["qwen3-4b"].steps_per_rollout == 0
    assert 7.5 * 2**30 / 147_456 / 64 == pytest.approx(0.83 * 1024, rel=0.01)


@pytest.mark.parametrize(
    ("words", "thinking"),
    [
        ([], None),
        (["--enable-thinking"], True),
        (["--no-enable-thinking"], False),
        (["--no_enable_thinking", "--max-steps", "3"], False),
        (["--enable-thinking", "False"], False),
        (["--enable-thinking=True"], True),
    ],
)
def test_thinking_has_three_states(words, thinking):
    assert read_config(words, None).enable_thinking is thinking


@pytest.mark.parametrize(
    ("visible", "index"),
    [(None, 0), ("1", 1), (" 1 ,0", 1), ("GPU-bbbb", 1), ("", None), ("-1", None), ("7", None), ("NoDevFiles", None)],
)
def test_visible_card_is_the_one_that_cuda_will_take(monkeypatch, visible, index):
    """NVML's answers for two cards; the rest is ours."""
    uuids = ["GPU-aaaa-1", "GPU-bbbb-2"]
    answers = dict(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUUID=lambda i: uuids[i],
        nvmlDeviceGetName=lambda i: f"card {i}",
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlDeviceGetMemoryInfo=lambda i: type("Memory", (), {"total": 16 * 2**30}),
        nvmlDeviceGetCudaComputeCapability=lambda i: [12, 0],
    )
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, seen = find_gpu()
    if index is None:
        assert found is None and f"CUDA_VISIBLE_DEVICES is {visible!r}, the machine has 2" in seen
    else:
        assert found.uuid == uuids[index] and seen == f"card {index} with 16 GiB is visible"
    monkeypatch.setenv("UNSLOTH_FORCE_CPU", "1")
    assert find_gpu() == (None, "UNSLOTH_FORCE_CPU is 1")


def test_a_card_that_is_lost_is_no_card(monkeypatch):
    def lost(*arguments):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lost)
    found, seen = find_gpu()
    assert found is None and "gpu is lost" in seen


def test_an_async_reward_is_checked_in_every_step_too():
    async def slow_reward(completions, **kwargs):
        return [float("nan")] * len(completions)

    strict = checks.strict(slow_reward)
    assert strict.__name__ == "slow_reward" and inspect.iscoroutinefunction(strict)
    with pytest.raises(Refused, match="slow_reward returned nan"):
        asyncio.run(strict(completions=["a"], prompts=["b"]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"max_steps": 1}, ["--warmup-steps 2 are more than --max-steps 1", "below --learning-rate 0.0003"]),
        ({"max_steps": 1, "warmup_steps": 0.5}, []),
        ({"max_steps": 5, "steps_per_generation": 4}, ["--max-steps 5 ends within a rollout", "8 uses it up"]),
    ],
)
def test_what_may_not_be_meant_is_said(changes, words):
    found = checks.notes(dataclasses.replace(PRESETS["smollm2"], **changes))
    assert len(found) == bool(words) and all(word in found[0] for word in words)
