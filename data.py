"""Problems: built by the task, as token ids through the model's chat template, and short enough."""

import inspect
import math

from checks import Refused, flag, one_line, short

# fields of the config that are handed on to make_dataset
OPTIONS = ("max_operand", "worked_examples", "system")


def build_dataset(task, config, preset, n: int, split: str):
    """The task's data set of n problems, with its shape checked.

    The config's OPTIONS go to make_dataset as keyword arguments. One that it does not take is left out where it is None
    or the preset's own value, and refused where it was asked for.
    """
    path = config.task
    if not callable(task.make_dataset):
        raise Refused(f"--task {path}: make_dataset is {short(task.make_dataset)}; it must be a function")
    accepted = inspect.signature(task.make_dataset).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    options = {}
    for name in OPTIONS:
        value = getattr(config, name)
        if value is not None and (takes_all or name in accepted):
            options[name] = value
        elif value not in (None, getattr(preset, name)):
            raise Refused(f"{flag(name)} {value}: make_dataset in {path} takes no {name}, only {', '.join(accepted)}")
    try:
        dataset = task.make_dataset(n, seed=config.seed, split=split, **options)
    except (Exception, SystemExit) as error:
        raise Refused(f"--task {path}: make_dataset({n}, seed={config.seed}, split={split!r}) raised "
                      f"{type(error).__name__}: {one_line(error)}") from error  # fmt: skip
    if "prompt" not in getattr(dataset, "column_names", ()):
        raise Refused(f"--task {path}: make_dataset returned {short(dataset)}, not a datasets.Dataset with a column prompt")
    if len(dataset) < n:
        raise Refused(f"--task {path}: make_dataset returned {len(dataset)} {split} problems, {n} were asked for")
    prompt = dataset[0]["prompt"]
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and "content" in prompt[-1]):
        raise Refused(f"--task {path}: prompt {short(prompt)} must be text, or a list of messages with `role` and `content`")
    return dataset


def encode(tokenizer, prompt, chat_template_kwargs) -> list[int]:
    """Token ids of a prompt: chat messages through the model's template, a string as it stands."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **chat_template_kwargs)


def can_think(config, tokenizer) -> bool:
    """Whether the model may think aloud before its answer: its template has a switch for that, and it is not off."""
    return "enable_thinking" in (tokenizer.chat_template or "") and config.enable_thinking is not False


def last_message(messages) -> str:
    """The text of a prompt or completion: a string, or the last of its chat messages."""
    return messages if isinstance(messages, str) else messages[-1]["content"]


def drop_long_prompts(dataset, tokenizer, config, what: str, least: int, console):
    """The data set without its prompts of more than max_prompt_length tokens; says how many were dropped.

    The pinned TRL has no max_prompt_length any more, and Unsloth ignores it: a longer prompt would not fit the engine.
    Raises Refused where fewer than `least` are left.
    """
    lengths = [len(encode(tokenizer, prompt, config.chat_template_kwargs)) for prompt in dataset["prompt"]]
    if 0 in lengths:
        raise Refused(f"--task {config.task}: {what} prompt {lengths.index(0)} has no tokens; each needs at least one")
    kept = [i for i, length in enumerate(lengths) if length <= config.max_prompt_length]
    if len(kept) < least:
        raise Refused(
            f"--max-prompt-length {config.max_prompt_length}: {len(kept)} of {len(lengths)} {what} prompts are that short, and "
            f"{least} are needed; the longest has {max(lengths)} tokens"
        )
    if len(kept) < len(lengths):
        dropped = len(lengths) - len(kept)
        console.say(f"{dropped} of {len(lengths)} {what} problems left out: prompts over {config.max_prompt_length} tokens")
    return dataset.select(kept)


def in_order(dataset, config):
    """The rows as training meets them: epoch after epoch, each shuffled by the seed, enough for max_steps of all processes.

    TRL's own shuffling starts at the first epoch in every process, so that a run resumed in a later one would meet other
    problems than the unbroken run. As in TRL, problems at the end of an epoch that fill no rollout are left out.
    """
    import torch

    generator = torch.Generator().manual_seed(config.seed)
    rollout = config.prompts_per_rollout * config.processes
    whole = len(dataset) // rollout * rollout
    needed = math.ceil(config.max_steps / config.steps_per_rollout) * rollout
    order = []
    while len(order) < needed:
        order += torch.randperm(len(dataset), generator=generator)[:whole].tolist()
    return dataset.select(order[:needed])
