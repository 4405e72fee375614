"""transformers' continuous batching kept from step to step: right answers, also after an update, and errors that are said."""

import dataclasses
import os
from types import SimpleNamespace

import pytest

import train  # isort: skip

os.environ.update({**train.ENVIRONMENT, **os.environ})  # before unsloth reads it
import unsloth  # noqa: E402, F401  # isort: skip
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig

import paged
import plain
from trainer import make_ready

CONFIG = train.Config(
    backend="paged", load_in="16bit", max_prompt_length=40, max_completion_length=12, num_generations=2,
    per_device_train_batch_size=6, steps_per_generation=None, seed=3,
)  # fmt: skip
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9], [5, 6, 7], list(range(3, 40)), [11, 12]]


@pytest.fixture
def model(tmp_path):
    """Two random layers under a LoRA that does something."""
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=1, pad_token_id=0, **shape)).save_pretrained(tmp_path)
    base = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    return plain.attach_lora(CONFIG, base)


@pytest.fixture
def engine(model):
    greedy = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=1, pad_token_id=0)
    arguments = ContinuousBatchingConfig(**paged.engine_arguments(CONFIG))
    return paged.ContinuousBatchingManager(model.get_base_model(), greedy, arguments)


def by_generate(model, prompt) -> list[int]:
    """The greedy answer of transformers' generate(), to its end."""
    model.get_base_model().set_attn_implementation("sdpa")
    ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt))
    tokens = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), do_sample=False,
                            max_new_tokens=12, eos_token_id=1, pad_token_id=0)[0, len(prompt):].tolist()  # fmt: skip
    model.get_base_model().set_attn_implementation("paged|sdpa")
    return tokens


def move(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)


def test_answers_are_generates_own_in_the_order_of_the_prompts_also_after_an_update(model, engine):
    model.eval()
    before = paged.generate(engine, PROMPTS)
    assert before == [by_generate(model, prompt) for prompt in PROMPTS]
    processor = engine.batch_processor
    move(model)
    after = paged.generate(engine, PROMPTS)
    assert after == [by_generate(model, prompt) for prompt in PROMPTS] and after != before
    assert engine.batch_processor is processor and engine._generation_thread is None


@pytest.mark.gpu
def test_cuda_graphs_answer_the_same_also_after_an_update(model):
    """A graph that held the adapter of its capture would go on with it."""
    model.cuda().eval()
    greedy = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=1, pad_token_id=0)
    arguments = ContinuousBatchingConfig(**paged.engine_arguments(dataclasses.replace(CONFIG, use_cuda_graph=True)))
    engine = paged.ContinuousBatchingManager(model.get_base_model(), greedy, arguments)
    before = paged.generate(engine, PROMPTS)
    assert before == [by_generate(model, prompt) for prompt in PROMPTS]
    move(model)
    after = paged.generate(engine, PROMPTS)
    assert after == [by_generate(model, prompt) for prompt in PROMPTS] and after != before


def test_an_engine_that_fails_is_an_error_and_not_a_shorter_list(model, engine, monkeypatch):
    model.eval()
    paged.generate(engine, PROMPTS)

    def fail(*arguments, **named):
        raise ValueError("a kernel that is not there")

    monkeypatch.setattr(engine.batch_processor.model_runner, "compute_batch", fail)
    with pytest.raises(RuntimeError, match="answered 0 of 6 prompts: a kernel that is not there") as failure:
        paged.generate(engine, PROMPTS)
    assert isinstance(failure.value.__cause__, ValueError)


def test_making_the_engine_leaves_the_random_numbers_alone(model, engine):
    """transformers seeds torch with a new number then: a resumed run would draw others than the unbroken one."""
    model.eval()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    paged.generate(engine, PROMPTS)  # greedy: it draws none
    assert torch.equal(torch.rand(3), expected)


def test_what_is_trained_stays_in_32_bits(model, engine):
    model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    model.eval()
    paged.generate(engine, PROMPTS)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("backend", ["trl", "paged"])
def test_the_adapter_is_in_32_bits_after_trl_has_cast_it(model, backend):
    """As TRL 1.15.0 casts it where the base is quantized; the base stays as it is."""
    model.to(torch.bfloat16)
    make_ready(dataclasses.replace(CONFIG, backend=backend), SimpleNamespace(model=model), gpu=None)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_no_block_outlives_the_policy_that_filled_it():
    arguments = paged.engine_arguments(CONFIG)
    assert arguments["allow_block_sharing"] is False
    # a block of 16 tokens more than the longest sequence takes, for each of the six
    assert (arguments["block_size"], arguments["num_blocks"]) == (16, 6 * (4 + 1))
    assert (arguments["q_padding_interval_size"], arguments["kv_padding_interval_size"]) == (8, 256)
