"""Every knob of the algorithm reaches the trainer: each one set, a trainer built as train.py builds it, one step run.

A random two-layer model with SmolLM2's tokenizer keeps a step under a second.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import train  # isort: skip

os.environ.update({**train.ENVIRONMENT, **os.environ})  # before unsloth reads it
from unsloth import FastLanguageModel  # noqa: E402  # isort: skip
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

import models
import task
from checks import Refused
from conftest import ROOT
from data import drop_long_prompts, encode
from parallel import World
from phases import Phases
from progress import Progress
from stopping import Stop
from train import PRESETS, Config
from trainer import grpo_arguments
from vram import Meter

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TINY = dataclasses.replace(
    PRESETS["smollm2"], max_steps=1, num_generations=2, per_device_train_batch_size=2, max_completion_length=4, warmup_steps=0
)
THINKING_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}/no_think{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(models.embedded_folder())
    tokenizer.chat_template = THINKING_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)
    return folder


def progress_of(config, reward, say, run_dir, samples=None):
    """The callback for one reward, with a record that keeps nothing but what it hands to `samples`."""
    rewards = SimpleNamespace(REWARDS=[reward], EXAMPLES=[{"rewards": [1.0]}])
    record = SimpleNamespace(metrics=lambda logs, step=None: None, samples=samples)
    phases = Phases(ON_GPU, say)
    meter = Meter(None, None, phases, None, say)
    return Progress(config, rewards, World(), SimpleNamespace(say=say), None, run_dir, record, Stop(), {}, None, False, phases,
                    meter, None)  # fmt: skip


@pytest.fixture
def said():
    """The lines that the run printed."""
    return []


@pytest.fixture
def run(folder, tmp_path, said):
    """Train one step of a config; returns the trainer and the last logs."""

    def run(**changes):
        config = dataclasses.replace(TINY, sample_steps=0, **changes)
        model, tokenizer = FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False, dtype=DTYPE)
        model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
        arguments = {**grpo_arguments(config, tmp_path, on_gpu=ON_GPU), "save_strategy": "no"}
        said.clear()
        progress = progress_of(config, length_reward, said.append, tmp_path)
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[length_reward],
            args=GRPOConfig(**arguments),
            train_dataset=task.make_dataset(8, max_operand=20),
            callbacks=[progress],
        )
        progress.phases.attach(trainer)
        trainer.train()
        return trainer, trainer.state.log_history[0]

    return run


def length_reward(completions, **kwargs):
    """Something that differs within a group, also for noise."""
    return [float(i) for i in range(len(completions))]


def test_loss_types_are_all_of_trl():
    (field,) = [f for f in dataclasses.fields(GRPOConfig) if f.name == "loss_type"]
    supported = field.metadata["help"].split("Supported values are ")[1].split(". ")[0]
    assert set(re.findall(r"'(\w+)'", supported)) == set(LOSS_TYPES) == set(Config.__annotations__["loss_type"].__args__)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_type(run, loss_type):
    level = "sequence" if loss_type == "luspo" else "token"
    trainer, logs = run(
        loss_type=loss_type, importance_sampling_level=level, epsilon_high=5.0 if loss_type == "cispo" else None
    )
    assert trainer.loss_type == loss_type and trainer.importance_sampling_level == level
    assert torch.isfinite(torch.tensor(float(logs["loss"]))) and float(logs["grad_norm"]) > 0


def test_epsilon_high(run):
    trainer, _ = run(epsilon=0.1, epsilon_high=0.28)
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.1, 0.28)


def test_epsilon_high_is_epsilon_where_it_is_not_given(run):
    trainer, _ = run(epsilon=0.1)
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.1, 0.1)


def test_num_iterations_and_steps_per_generation(run, said):
    trainer, _ = run(num_iterations=2, steps_per_generation=2, max_steps=5)
    assert trainer.num_iterations == trainer.args.steps_per_generation == 2
    # two groups, and two optimizer steps on each: only the first of the four generates, and earns rewards
    steps = [logs for logs in trainer.state.log_history if "loss" in logs]
    assert ["reward" in logs for logs in steps] == [True, False, False, False, True]
    assert [line.split("  ")[:2] for line in said] == [
        ["step 1/5", "reward 1.500"],
        ["step 2/5", "2 of 4 of its rollout"],
        ["step 3/5", "3 of 4 of its rollout"],
        ["step 4/5", "4 of 4 of its rollout"],
        ["step 5/5", "reward 1.500"],
    ]
    # what a rollout generated is what its steps share
    generated, seconds = steps[0]["completions/mean_length"] * 4, [sum(seconds_of(logs)) for logs in steps]
    assert steps[3]["tokens_per_second/overall"] == pytest.approx(generated / sum(seconds[:4]), rel=0.05)
    assert all(logs["seconds/generation"] == 0 for logs in steps[1:4]) and steps[4]["seconds/generation"] > 0


def seconds_of(logs):
    return [value for name, value in logs.items() if name.startswith("seconds/")]


def test_speed_and_time_left_by_hand(tmp_path):
    """Rollouts of four steps, 8 completions each: 80 and 96 tokens, of which the first step waits for all."""
    config = dataclasses.replace(TINY, steps_per_generation=4, max_steps=12, beta=0.1)
    progress = progress_of(config, length_reward, print, tmp_path)
    shown, overall, left = [], [], []
    for step, seconds in enumerate([9.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0], 1):
        first = step % 4 == 1
        progress.seconds.append(seconds)
        progress.parts = {"generation": 4.0 * first, "forward_backward": 0.5}
        logs = {"loss": 0.0, "kl": 0.01, "clip_ratio/region_mean": 0.02, "num_tokens": 200 + 360 * (step > 4)}
        if first:
            rewards = {"reward": 0.5, "rewards/length_reward/mean": 0.5}
            logs |= {**rewards, "completions/mean_length": 10.0 if step == 1 else 12.0}
        found = progress.speed(logs)
        assert ("tokens_per_second/generated" in found) == first
        # prompts and answers of the rollout, a quarter in each step
        assert found["tokens_per_second/trained"] == pytest.approx((200 if step <= 4 else 360) / 4 / 0.5)
        overall.append(found["tokens_per_second/overall"])
        left.append(progress.eta(12 - step))
        shown.append(progress.line(step, logs | found))
    # over the seconds of the last four steps, as far as there are any: 80 tokens in 12 s, then 96 in 8
    assert overall == pytest.approx([80 / 4 / 9, 80 / 4 / 5, 80 / 4 * 3 / 11, 80 / 12, 96 / 4 / 2, 12.0, 12.0, 12.0])
    # by what there is of the first rollout, which says too much, until there is a second one, of 2 s a step
    assert left == [11 * 9, 10 * 5, round(9 * 11 / 3), 8 * 3, 7 * 3, 6 * 3, 5 * 3, 4 * 2]
    line = r"step  (\d+)/12  (.+?)  kl 0.0100  clipped 0.0200  (\d+) tok/s  (\d.\d) s  \d+.\d GiB  eta 0:(\d\d)"
    assert re.fullmatch(line, shown[1]).groups() == ("2", "2 of 4 of its rollout", "4", "1.0", "50")
    assert re.fullmatch(line, shown[4]).groups() == ("5", "reward 0.500  length 0.500", "12", "5.0", "21")
    assert re.fullmatch(line, shown[7]).groups() == ("8", "4 of 4 of its rollout", "12", "1.0", "08")


def test_a_checkpoint_and_a_stop_wait_for_the_end_of_the_rollout(tmp_path):
    """Due every 3 steps, with rollouts of 4: at the next end of one; and at the last step, wherever that is."""
    config = dataclasses.replace(TINY, steps_per_generation=4, max_steps=14, save_steps=3)
    progress = progress_of(config, length_reward, print, tmp_path)
    progress.phases = SimpleNamespace(end_step=dict, imports=1.0, made=0.0)

    def after(step):
        progress.start, control = 0.0, SimpleNamespace(should_training_stop=False, should_save=False)
        progress.on_step_end(None, SimpleNamespace(global_step=step), control)
        return control

    assert [step for step in range(1, 15) if after(step).should_save] == [4, 8, 12, 14]
    progress.stop.asked = 15
    assert [step for step in range(1, 13) if after(step).should_training_stop] == [4, 8, 12]
    assert after(14).should_training_stop and after(4).should_save
    progress.config = dataclasses.replace(config, save_steps=8)
    progress.stop.asked = None
    assert [step for step in range(1, 15) if after(step).should_save] == [8, 14]


def test_beta_brings_the_kl(run):
    trainer, logs = run(beta=0.5)
    assert trainer.beta == 0.5 and "kl" in logs
    assert "kl" not in run(beta=0.0)[1]


def test_every_value_is_the_configs(run):
    trainer, _ = run(temperature=0.7, top_p=0.9, top_k=50, scale_rewards="batch", mask_truncated_completions=True,
                     learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5, lr_scheduler_type="cosine", seed=7)  # fmt: skip
    got = {name: getattr(trainer.args, name) for name in (
        "temperature", "top_p", "top_k", "scale_rewards", "mask_truncated_completions", "learning_rate", "weight_decay",
        "max_grad_norm", "seed", "data_seed", "bf16", "fp16", "gradient_checkpointing", "steps_per_generation")}  # fmt: skip
    assert got == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 50, "scale_rewards": "batch", "mask_truncated_completions": True,
        "learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 0.5, "seed": 7, "data_seed": 7, "bf16": ON_GPU,
        "fp16": False, "gradient_checkpointing": False, "steps_per_generation": 1}  # fmt: skip
    assert trainer.args.lr_scheduler_type == "cosine" and trainer.args.optim == "adamw_torch_fused"


@pytest.mark.parametrize(("thinking", "expected"), [(None, "hi"), (True, "hi"), (False, "hi/no_think")])
def test_enable_thinking_reaches_template_and_trainer(run, folder, thinking, expected):
    trainer, _ = run(enable_thinking=thinking)
    assert trainer.chat_template_kwargs == ({} if thinking is None else {"enable_thinking": thinking})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(encode(tokenizer, prompt, trainer.chat_template_kwargs)) == expected


def test_columns_that_a_reward_logs_do_not_disturb_the_samples(folder, tmp_path):
    """TRL writes what a reward hands to log_extra into the same table."""
    tables, said = [], []

    def noting_reward(completions, log_extra, **kwargs):
        log_extra("note", ["a text"] * len(completions))
        return length_reward(completions)

    config = dataclasses.replace(TINY, sample_steps=1)
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False, dtype=DTYPE)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
    arguments = {**grpo_arguments(config, tmp_path, on_gpu=ON_GPU), "save_strategy": "no"}
    progress = progress_of(config, noting_reward, said.append, tmp_path, tables.append)
    trainer = GRPOTrainer(model, noting_reward, GRPOConfig(**arguments), task.make_dataset(8, max_operand=20), None, tokenizer,
                          callbacks=[progress])  # fmt: skip
    progress.phases.attach(trainer)
    trainer.train()
    assert tables[0]["note"] == ["a text"] * 2
    assert [line.split("  ")[-1] for line in said if line.startswith("    ")] == ["noting 1", "noting 0"]


def test_a_reward_that_does_not_apply_is_no_error(tmp_path):
    """TRL takes None from a reward, and then logs None as its mean."""

    def some_reward(completions, **kwargs):
        return [None] * len(completions)

    progress = progress_of(TINY, some_reward, print, tmp_path)
    progress.seconds = [1.0]
    logs = {"loss": 0.0, "reward": None, "rewards/some_reward/mean": None, "tokens_per_second/overall": 6.0}
    assert progress.line(1, logs).startswith("step 1/1  reward none  some none  6 tok/s  1.0 s  ")


def test_long_prompts_are_dropped_with_the_count_or_refused(folder):
    said = []
    tokenizer, console = AutoTokenizer.from_pretrained(folder), SimpleNamespace(say=said.append)
    dataset = task.to_dataset([{"prompt": "word " * n, "target": 0} for n in (5, 200, 10, 300)])
    kept = drop_long_prompts(dataset, tokenizer, TINY, "training", 1, console)
    assert [row["prompt"] for row in kept] == ["word " * 5, "word " * 10]
    assert said == ["2 of 4 training problems left out: prompts over 128 tokens"]
    with pytest.raises(Refused, match="0 of 4 training prompts are that short, and 1 are needed; the longest has 301 tokens"):
        drop_long_prompts(dataset, tokenizer, dataclasses.replace(TINY, max_prompt_length=2), "training", 1, console)
    empty = task.to_dataset([{"prompt": text, "target": 0} for text in ("a word", "")])
    with pytest.raises(Refused, match="training prompt 1 has no tokens; each needs at least one"):
        drop_long_prompts(empty, tokenizer, TINY, "training", 1, console)


def test_one_model_learns_again_and_again(folder, tmp_path, monkeypatch, capsys):
    """Each run from a new adapter, with a reference too, and once with a rollout for two steps."""
    import benchmark

    monkeypatch.setattr(benchmark, "find_gpu", lambda: (None, ""))
    benchmark.main(["learn", "--seeds", "2", "--rollout", "2", "--points", "2", "--out", str(tmp_path), "--model", str(folder),
                    "--preset", "smollm2", "--max-steps", "4", "--eval-problems", "4", "--beta", "0.1",
                    "--num-generations", "2", "--per-device-train-batch-size", "2",
                    "--max-completion-length", "4"])  # fmt: skip
    curves = json.loads((tmp_path / "learn.json").read_text())["curves"]
    assert [(curve["seed"], curve["groups"]) for curve in curves] == [(0, 1), (0, 2), (1, 2), (1, 1)]
    for curve in curves:
        assert [point[:2] for point in curve["points"]] == [[0, 0], [2, 4], [4, 8]]
    said = capsys.readouterr().out
    assert "| seed | groups a rollout | accuracy | against 1 |" in said and "95 % interval over 2 seeds" in said
    assert (tmp_path / "benchmark.log").exists()
    assert (tmp_path / "learn.png").stat().st_size > 10_000


@pytest.fixture
def reads(monkeypatch):
    """Names and arguments of what transformers really reads; what was patched is put back afterwards."""
    read, reads = AutoTokenizer.from_pretrained, []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **named: reads.append(named) or read(*args, **named))
    return reads


def test_a_tokenizer_is_read_once_and_each_gets_its_own(folder, reads):
    """The calls are those that Unsloth makes, twice, and vLLM."""
    lab = models.read_tokenizer(folder)
    slow = AutoTokenizer.from_pretrained(folder, model_max_length=7, padding_side="right", token=None, use_fast=False,
                                         legacy=False, from_slow=True, cache_dir=None, revision=None)  # fmt: skip
    vllms = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, revision=None, truncation_side="left")
    assert reads == [{}]
    assert (slow.model_max_length, slow.padding_side, vllms.truncation_side) == (7, "right", "left")
    assert type(slow) is type(vllms) is type(lab) and vars(vllms).keys() == vars(lab).keys()
    # what one changes, its vocabulary too, the others do not see
    slow.add_special_tokens({"pad_token": "<a new one>"})
    slow(["1", "1 + 2 + 3"], padding=True)
    for tokenizer in (lab, vllms):
        assert len(tokenizer) == len(slow) - 1 and tokenizer.pad_token != slow.pad_token
        assert [len(ids) for ids in tokenizer(["1", "1 + 2 + 3"]).input_ids] == [1, 7]
    assert AutoTokenizer.from_pretrained(folder).pad_token == lab.pad_token


@pytest.mark.parametrize("named", [{"revision": "main"}, {"clean_up_tokenization_spaces": False}, {"add_bos_token": False}])
def test_a_tokenizer_that_is_asked_for_otherwise_is_read_anew(named, folder, reads):
    models.read_tokenizer(folder)
    AutoTokenizer.from_pretrained(folder, **named)
    assert reads == [{}, named]


def test_another_tokenizer_and_one_that_heeds_legacy_are_read_anew(folder, reads, monkeypatch, tmp_path):
    tokenizer = models.read_tokenizer(folder)
    tokenizer.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path)
    monkeypatch.setattr(type(tokenizer), "legacy", True, raising=False)
    AutoTokenizer.from_pretrained(folder, legacy=False)
    assert reads == [{}, {}, {"legacy": False}]


def test_unsloth_keeps_the_token_that_begins_a_text(folder, tmp_path):
    """It sets add_bos_token on its own tokenizer, which rewrites what is put around a text, and looks whether that is right.

    In a process of its own: its module patches TRL for a GPU as it is imported.
    """
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", first)]
    )
    tokenizer.save_pretrained(tmp_path)
    script = (
        "import sys, unsloth, models; from unsloth.tokenizer_utils import load_correct_tokenizer; folder = sys.argv[1]\n"
        "by_itself = load_correct_tokenizer(folder)('1').input_ids\n"
        "lab = models.read_tokenizer(folder)\n"
        "print([by_itself, load_correct_tokenizer(folder)('1').input_ids, lab('1').input_ids])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_itself, beside, lab = json.loads(done.stdout.splitlines()[-1])
    assert by_itself == beside == lab and lab[0] == first
