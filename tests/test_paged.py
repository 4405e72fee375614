"""transformers' continuous batching kept from step to step: right answers, also after an update, and errors that are said."""

import ast
import dataclasses
import functools
import os
import runpy
from types import SimpleNamespace

import pytest

import train  # isort: skip

os.environ.update({**train.ENVIRONMENT, **os.environ})  # before unsloth reads it
import unsloth  # noqa: E402, F401  # isort: skip
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig

import budget
import models
import paged
import plain
from parallel import World
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


def engine_of(model, config=CONFIG):
    greedy = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=1, pad_token_id=0)
    model.eval()
    return paged.make_engine(model.get_base_model(), greedy, ContinuousBatchingConfig(**paged.engine_arguments(config)))


@pytest.fixture
def engine(model):
    return engine_of(model)


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
    engine = engine_of(model.cuda(), dataclasses.replace(CONFIG, use_cuda_graph=True))
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


def test_making_the_engine_leaves_the_random_numbers_alone(model):
    """transformers seeds torch with a new number then: a resumed run would draw others than the unbroken one."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    paged.generate(engine_of(model), PROMPTS)  # greedy: it draws none
    assert torch.equal(torch.rand(3), expected)


def test_the_trainer_hands_over_the_cache_as_it_is_planned(model):
    """All layers' keys and values, once, before it answers: what the memory table calls the KV cache."""
    trainer = object.__new__(paged.PagedTrainer)
    trainer.accelerator, trainer.model = SimpleNamespace(unwrap_model=lambda model: model), model
    trainer.generation_config = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=1, pad_token_id=0)
    trainer.continuous_batching_config = ContinuousBatchingConfig(**paged.engine_arguments(CONFIG))
    model.train()
    caches = []
    trainer.on_cache = caches.append
    for _ in range(2):
        answers, log_probs = trainer._generate_single_turn(PROMPTS)
    assert len(answers) == len(PROMPTS) and log_probs is None and model.training
    assert model.get_base_model().config._attn_implementation == "sdpa"
    tokens = (budget.paged_blocks(CONFIG) + 2) * budget.PAGED_BLOCK  # two blocks for padding
    assert len(caches) == 1 and sum(tensor.nbytes for tensor in caches[0]) == tokens * 2 * 2 * 1 * 16 * 4  # 32 bits


@pytest.mark.parametrize(("device", "error"), [("cpu", MemoryError), ("cuda", torch.cuda.OutOfMemoryError)])
def test_a_cache_without_room_says_whose_room(device, error, model, monkeypatch):
    def full(self):
        raise MemoryError("0 blocks")

    monkeypatch.setattr(paged.ContinuousBatchingManager, "warmup", full)
    monkeypatch.setattr(type(model.get_base_model()), "device", SimpleNamespace(type=device))
    with pytest.raises(MemoryError if device == "cpu" else torch.cuda.OutOfMemoryError) as failure:
        engine_of(model)
    assert type(failure.value) is error and "0 blocks" in str(failure.value)


def test_what_is_trained_stays_in_32_bits(model):
    model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    paged.generate(engine_of(model), PROMPTS)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("backend", ["trl", "paged"])
def test_the_adapter_is_in_32_bits_after_trl_has_cast_it(model, backend):
    """As TRL 1.15.0 casts it where the base is quantized; the base stays as it is."""
    model.to(torch.bfloat16)
    make_ready(dataclasses.replace(CONFIG, backend=backend), SimpleNamespace(model=model), gpu=None, world=World())
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("in_4_bits", [True, False])
def test_all_back_ends_load_one_copy_of_a_model(in_4_bits, monkeypatch):
    """Every name in Unsloth's tables comes out as from Unsloth itself, which is not asked by the plain back ends."""
    from unsloth.models import loader_utils, mapper

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for a newer table it would ask GitHub
    tables = [mapper.FLOAT_TO_INT_MAPPER, mapper.INT_TO_FLOAT_MAPPER, mapper.MAP_TO_UNSLOTH_16bit, loader_utils.BAD_MAPPINGS]
    names = sorted({name for table in tables for name in (*table, *map(str, table.values()))} | {"owner/unknown"})
    assert len(names) > 1000
    run_path = runpy.run_path
    monkeypatch.setattr(runpy, "run_path", functools.cache(run_path))
    monkeypatch.setattr(ast, "parse", functools.cache(ast.parse))
    for name in names:
        wanted = loader_utils.get_model_name(name, load_in_4bit=in_4_bits) or name
        assert models.unsloths_copy(name, in_4_bits) == wanted, name


def test_no_block_outlives_the_policy_that_filled_it():
    arguments = paged.engine_arguments(CONFIG)
    assert arguments["allow_block_sharing"] is False
    # a block of 16 tokens more than the longest sequence takes, for each of the six
    assert (arguments["block_size"], arguments["num_blocks"]) == (16, 6 * (4 + 1))
    assert (arguments["q_padding_interval_size"], arguments["kv_padding_interval_size"]) == (8, 256)
