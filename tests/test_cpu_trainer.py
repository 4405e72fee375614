"""The trainer for a CPU against TRL's own, on small random decoders: the same numbers, from fewer tokens."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, GraniteConfig, LlamaConfig, MistralConfig, Qwen3Config, SmolLM3Config
from transformers.models.auto import AutoModelForCausalLM
from trl.trainer import utils

import cpu_trainer
import models
import shared_prompt

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, vocab_size=49152, pad_token_id=2)  # fmt: skip
DECODERS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 1, 1, 0]),
    "granite": GraniteConfig(**SIZES, logits_scaling=3.0, attention_multiplier=0.2, residual_multiplier=0.5),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
}


@pytest.fixture(autouse=True)
def plain_head(monkeypatch):
    """Instead of TRL's kernel, which needs a GPU, and of Unsloth's for CPUs: log-probs and entropies from all logits."""

    def apply(hidden, weight, bias, targets, temperature, chunk, softcapping, scale, outputs):
        all_log_probs = ((hidden @ weight.T) * scale / temperature).log_softmax(-1)
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1) if "entropy" in outputs else None
        return all_log_probs.gather(-1, targets[:, None])[:, 0], entropy, None, None, None

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", SimpleNamespace(apply=apply))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Nothing here is large enough for two, which wait for each other where other tests hold the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(models.resolve_model("smollm2-135m-instruct", "16bit", on_gpu=False))


@pytest.fixture
def make(tokenizer, tmp_path):
    """A function that makes a trainer of a class: a random decoder whose adapter is not 0, and one thread of randomness."""

    def make(trainer_class, config=DECODERS["llama"], rewards=None, **arguments):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        prompts = Dataset.from_list([{"prompt": "What is one and" + " one" * (i % 3) + "?"} for i in range(64)])
        settings = dict(output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
                        num_generations=4, per_device_train_batch_size=8, max_completion_length=6, loss_type="dr_grpo",
                        learning_rate=1e-2, logging_steps=1, save_strategy="no", disable_tqdm=True)  # fmt: skip
        return trainer_class(
            model=model,
            processing_class=tokenizer,
            reward_funcs=rewards or (lambda completions, **kwargs: [len(set(text)) / 10 for text in completions]),
            args=trl.GRPOConfig(**{**settings, **arguments}),
            train_dataset=prompts,
        )

    return make


def batch(prompt_lengths=(5, 5, 5, 5), completion_lengths=(3, 6, 1, 4), advantages=(1.0, -0.5, 0.25, -0.75)):
    """A batch as _compute_loss takes it: a prompt for each different length, completions at random; 2 fills."""
    generator = torch.Generator().manual_seed(1)
    prompts = {n: torch.randint(3, 999, (n,), generator=generator) for n in sorted(set(prompt_lengths))}
    before, after = max(prompt_lengths), max(max(completion_lengths), 1)
    inputs = dict(
        prompt_ids=torch.full((len(prompt_lengths), before), 2),
        prompt_mask=torch.zeros(len(prompt_lengths), before, dtype=torch.long),
        completion_ids=torch.full((len(prompt_lengths), after), 2),
        completion_mask=torch.zeros(len(prompt_lengths), after, dtype=torch.long),
        advantages=torch.tensor(advantages),
        num_items_in_batch=torch.tensor(sum(completion_lengths)),
    )
    for i, (p, c) in enumerate(zip(prompt_lengths, completion_lengths)):
        inputs["prompt_ids"][i, before - p :], inputs["prompt_mask"][i, before - p :] = prompts[p], 1
        inputs["completion_ids"][i, :c], inputs["completion_mask"][i, :c] = torch.randint(3, 999, (c,), generator=generator), 1
    return inputs


@contextlib.contextmanager
def counted(trainer):
    """A list that gets the shape of the tokens in each pass through the model."""
    shapes = []
    embeddings = trainer.model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, arguments, output: shapes.append(tuple(arguments[0].shape)))
    yield shapes
    hook.remove()


def passed(trainer, inputs):
    """Log-probs, entropies, loss, gradients by name, and the shapes of the passes, of one training pass."""
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    with counted(trainer) as shapes:
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
    with torch.no_grad():
        log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, inputs["completion_ids"].shape[1], compute_entropy=True
        )
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}
    return log_probs, entropies, loss.detach(), gradients, shapes


def assert_same(ours, theirs):
    for mine, other in zip(ours[:4], theirs[:4]):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_group_in_one_row_gives_what_rows_of_their_own_give(make, decoder):
    inputs = batch()
    theirs, ours = (passed(make(c, DECODERS[decoder]), inputs) for c in (trl.GRPOTrainer, cpu_trainer.CPUTrainer))
    assert_same(ours, theirs)
    assert any(gradient.abs().max() > 1e-4 for gradient in theirs[3].values())
    assert theirs[4] == [(4, 5 + 6)] and ours[4] == [(1, 4 + 3 + 6 + 1 + 4)]  # all but the prompt's last, and the completions


@pytest.mark.parametrize(
    ("prompt_lengths", "completion_lengths", "packed"),
    [
        ((5, 9, 5, 9), (3, 6, 1, 4), (2, 8 + 6 + 4)),  # shuffled rows of two groups, padded on the left
        ((9, 9, 9, 5), (3, 0, 6, 4), (2, 8 + 3 + 6)),  # one that was cut off and masked
        ((9, 9, 9, 9), (0, 0, 0, 0), (1, 8)),  # all of them
        ((1, 1, 1, 1), (3, 6, 1, 4), (1, 3 + 6 + 1 + 4)),  # no more than the last token of a prompt
        ((3, 4, 5, 6), (3, 6, 1, 4), (4, 3 + 6)),  # nothing to share but the padding
    ],
)
def test_rows_that_differ(make, prompt_lengths, completion_lengths, packed):
    inputs = batch(prompt_lengths, completion_lengths)
    theirs, ours = (passed(make(c), inputs) for c in (trl.GRPOTrainer, cpu_trainer.CPUTrainer))
    assert_same(ours, theirs)
    assert ours[4] == [packed]


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZES, sliding_window=4),
        Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=2),
    ],
    ids=["all layers slide", "some layers slide"],
)
def test_where_rows_cannot_be_shared_the_pass_is_trl_s(make, config):
    inputs = batch()
    theirs, ours = (passed(make(c, config), inputs) for c in (trl.GRPOTrainer, cpu_trainer.CPUTrainer))
    assert_same(ours, theirs)
    assert ours[4] == theirs[4]


def test_long_answers_keep_rows_of_their_own():
    """A short prompt and long answers: one row would pay more for attention than it spares."""
    config = LlamaConfig(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
    answers = torch.ones(8, 74 + 768, dtype=torch.long)
    assert not shared_prompt.pays(config, shared_prompt.pack(answers, answers, 768), *answers.shape)
    assert shared_prompt.pays(config, shared_prompt.pack(answers[:, :94], answers[:, :94], 20), 8, 94)


def test_a_group_without_advantages_moves_adam_as_trl_does(make):
    """Gradients that are 0, not missing: the second step goes on by the momentum of the first. No backward pass is run."""
    ends = []
    for trainer_class in (trl.GRPOTrainer, cpu_trainer.CPUTrainer):
        trainer = make(trainer_class)
        optimizer = torch.optim.AdamW([p for p in trainer.model.parameters() if p.requires_grad], lr=1e-2)
        passed(trainer, batch())
        optimizer.step()
        between = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
        backward = []
        trainer.model.get_base_model().model.norm.register_full_backward_hook(lambda *_, calls=backward: calls.append(1))
        *_, loss, gradients, _ = passed(trainer, batch(advantages=(0.0, 0.0, 0.0, 0.0)))
        optimizer.step()
        assert loss == 0 and all(gradient.count_nonzero() == 0 for gradient in gradients.values())
        assert len(backward) == (trainer_class is trl.GRPOTrainer)
        ends.append([p.detach() for p in trainer.model.parameters() if p.requires_grad])
        assert any(not torch.equal(a, b) for a, b in zip(between, ends[-1]))
        assert {"entropy", "clip_ratio/high_max"} <= set(trainer._metrics["train"])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-6)


def test_answers_are_those_of_trl_and_the_weights_are_left_alone(make):
    prompts = [list(range(10, 15))] * 4 + [list(range(20, 29))] * 4
    answers, shapes = [], []
    for trainer_class in (trl.GRPOTrainer, cpu_trainer.CPUTrainer):
        trainer = make(trainer_class)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        torch.manual_seed(3)
        with counted(trainer) as seen:
            answers.append(trainer._generate_single_turn(prompts, None, {}, 4)[0])
        shapes.append(seen)
        assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
        assert not any(getattr(module, "merged", False) for module in trainer.model.modules())
        assert "generate" not in vars(trainer.model)
    assert answers[0] == answers[1]
    assert shapes[0][:2] == [(8, 9), (8, 1)] and shapes[1][:2] == [(2, 8), (8, 1)]


def test_what_is_merged_is_the_adapter_and_it_is_taken_out_when_generating_fails(make):
    trainer = make(cpu_trainer.CPUTrainer)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        apart = trainer.model(ids).logits
        with pytest.raises(KeyboardInterrupt), trainer.merged(trainer.model):
            assert all(layer.merged for layer in trainer.model.modules() if isinstance(layer, cpu_trainer.LoraLayer))
            torch.testing.assert_close(trainer.model(ids).logits, apart, rtol=1e-4, atol=1e-6)
            raise KeyboardInterrupt
        assert torch.equal(trainer.model(ids).logits, apart)


@pytest.mark.parametrize("rows", [1, 16, 17])
@pytest.mark.parametrize("bias", [None, torch.arange(5.0)])
def test_products_are_those_of_linear(rows, bias):
    x, weight = torch.randn(rows, 1, 7), torch.randn(5, 7)
    torch.testing.assert_close(cpu_trainer.product(weight, bias, x), torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("why", ["too large", "no plain LoRA"])
def test_where_weights_cannot_be_copied_answers_are_still_those_of_trl(make, monkeypatch, why):
    monkeypatch.setattr(cpu_trainer, *(("COPIED_AT_MOST", 0) if why == "too large" else ("can_merge", lambda layer: False)))
    answers = []
    for trainer_class in (trl.GRPOTrainer, cpu_trainer.CPUTrainer):
        trainer = make(trainer_class)
        torch.manual_seed(3)
        answers.append(trainer._generate_single_turn([list(range(10, 15))] * 4, None, {}, 4)[0])
    assert trainer.copies is None and answers[0] == answers[1]


def test_training_ends_where_trl_s_does(make):
    """Two groups a rollout, shuffled over two passes, each rollout used twice, and a reference: 4 steps of everything."""
    ends = []
    for trainer_class in (trl.GRPOTrainer, cpu_trainer.CPUTrainer):
        trainer = make(trainer_class, max_steps=4, beta=0.1, num_iterations=2, per_device_train_batch_size=4,
                       gradient_accumulation_steps=2, steps_per_generation=2)  # fmt: skip
        trainer.eos_token_ids = trainer.generation_config.eos_token_id = list(range(0, 49152, 4))  # answers of 1 to 6 tokens
        trainer.train()
        logs = [[log[k] for k in ("loss", "grad_norm", "kl", "entropy")] for log in trainer.state.log_history if "loss" in log]
        ends.append((logs, {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}))
    assert len(ends[0][0]) == 4 and ends[0][0][0][1] > 0 and ends[0][0][-1][2] > 0
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-5)
