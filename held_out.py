"""Held-out problems, answered greedily and scored with the task's own rewards. Import it after unsloth."""

import json
import shutil
import time
from pathlib import Path

import torch

import adapter
import checkpoints
from budget import EVALUATED_AT_ONCE
from checks import call_reward
from data import encode


class HeldOut:
    """The held-out points of a run: said, recorded, and the adapter that solved most kept in `best-adapter/`.

    Most is by the first function in REWARDS; of equals, the earliest stays. `facts`, which go into every checkpoint, keep
    the points (`held_out`, a list of [step, scores]) and the best of them (`best`), so that a resumed run knows both.
    """

    def __init__(self, config, task, model, tokenizer, problems, run_dir, record, console, facts):
        self.config, self.task, self.model, self.tokenizer, self.problems = config, task, model, tokenizer, problems
        self.run_dir, self.record, self.console, self.facts = run_dir, record, console, facts
        self.seconds_before = 0.0  # of the evaluation before training, where this process made it

    def before(self) -> None:
        """The base model's point; a run that goes on has it from its checkpoint."""
        if not self.facts["held_out"]:
            self.console.doing = "the evaluation before training"
            self.seconds_before = self.point(0, None)["seconds"]
        self.console.say(f"held-out, before: {in_words(self.facts['held_out'][0][1])}")

    def during(self, step: int) -> None:
        """A point on the curve, with the adapter as it stands; vLLM reads it from disk."""
        self.console.doing = f"the evaluation after step {step}"
        candidate = self.run_dir / "candidate-adapter"
        adapter.save(self.model, candidate)
        scores = self.point(step, candidate if self.config.fast_inference else None)
        self.console.say(f"held-out, step {step}: {in_words(scores)}")
        self.keep(step, scores, candidate)
        shutil.rmtree(candidate, ignore_errors=True)

    def after(self, step: int, folder) -> None:
        """The last point, with the adapter read back from `folder`."""
        self.console.doing = "the evaluation after training"
        scores = self.point(step, folder)
        self.console.say(f"held-out, before: {in_words(self.facts['held_out'][0][1])}")
        self.console.say(f"held-out, after:  {in_words(scores)}")
        if self.config.eval_steps:
            self.keep(step, scores, folder)
            best = self.facts["best"]
            self.console.say(f"best adapter: step {best['step']}, {best['name']} {best['score']:.3f}: {best['folder']}")
            if Path(best["folder"]).is_dir():
                self.record.adapter(Path(best["folder"]), to="lora-best")

    def point(self, step: int, folder) -> dict[str, float]:
        scores, answers = evaluate(self.config, self.task, self.model, self.tokenizer, self.problems, folder)
        self.record.held_out(scores, self.problems, answers, step)
        self.facts["held_out"].append([step, scores])
        return scores

    def keep(self, step: int, scores: dict[str, float], folder) -> None:
        """Copy `folder` to best-adapter/ where its scores beat the best so far."""
        name = self.task.REWARDS[0].__name__
        best = self.facts["best"]
        if best and scores[name] <= best["score"]:
            return
        aside, best_dir = self.run_dir / ".best-adapter", self.run_dir / "best-adapter"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(folder, aside)
        self.facts["best"] = {"step": step, "name": name, "score": scores[name], "folder": str(best_dir.resolve())}
        (aside / checkpoints.BEST).write_text(json.dumps(self.facts["best"]))
        adapter.replace_folder(aside, best_dir)


def evaluate(config, task, model, tokenizer, problems, adapter_dir=None) -> tuple[dict[str, float], list[str]]:
    """Answer `problems` (a Dataset with a column `prompt`); returns scores and answers.

    With `adapter_dir`, the adapter saved there is read from disk and used; without, the model answers as it stands,
    which before the first step is the base model. Scores hold, for each reward function, `<name>` (the share of
    problems whose reward is above 0: with a reward of 1.0 for the right answer, the accuracy) and `<name>/mean`, and
    the `seconds` it took.
    """
    start = time.perf_counter()
    prompts = [encode(tokenizer, prompt, config.chat_template_kwargs) for prompt in problems["prompt"]]
    generate = answer_with_vllm if config.fast_inference else answer_with_transformers
    token_ids = generate(config, model, tokenizer, prompts, adapter_dir)
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    columns = {name: problems[name][:] for name in problems.column_names if name != "prompt"}
    scores = {}
    for reward in task.REWARDS:
        values = call_reward(reward, problems["prompt"][:], texts, token_ids, columns)
        scores[reward.__name__] = sum(value > 0 for value in values) / len(values)
        scores[f"{reward.__name__}/mean"] = sum(values) / len(values)
    scores["seconds"] = time.perf_counter() - start
    return scores, texts


def answer_with_vllm(config, model, tokenizer, prompts, adapter_dir) -> list[list[int]]:
    """Token ids of greedy answers, from the engine in this process."""
    from vllm import SamplingParams

    outputs = model.fast_generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=config.max_completion_length),
        lora_request=model.load_lora(str(adapter_dir)) if adapter_dir else None,
        use_tqdm=False,
    )
    if config.vllm_enable_sleep_mode:  # Unsloth wakes the engine for this, and leaves it awake
        model.vllm_engine.sleep(1)
    return [list(output.outputs[0].token_ids) for output in outputs]


def answer_with_transformers(config, model, tokenizer, prompts, adapter_dir) -> list[list[int]]:
    """Token ids of greedy answers, from generate(), padded on the left."""
    if adapter_dir:
        model.load_adapter(str(adapter_dir), adapter_name="saved")
        model.set_adapter("saved")
        model.delete_adapter("default")  # what answers now can only be what was read
    model.for_inference() if hasattr(model, "for_inference") else model.eval()  # Unsloth's, or plain PEFT
    answers = []
    for i in range(0, len(prompts), EVALUATED_AT_ONCE):
        rows = prompts[i : i + EVALUATED_AT_ONCE]
        batch = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt").to(model.device)
        with torch.inference_mode():
            tokens = model.generate(**batch, max_new_tokens=config.max_completion_length, do_sample=False)
        for row in tokens[:, batch["input_ids"].shape[1] :].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            answers.append(row[:end])  # without the padding after the end
    model.for_training() if hasattr(model, "for_training") else model.train()
    return answers


def in_words(scores: dict[str, float]) -> str:
    """The scores of one evaluation on one line; a share is of the problems whose reward is above 0."""
    shares = [f"{name.removesuffix('_reward')} {v:.3f}" for name, v in scores.items() if "/" not in name and name != "seconds"]
    return "  ".join([*shares, f"({scores['seconds']:.0f} s)"])
