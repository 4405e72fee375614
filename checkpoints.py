"""Checkpoints: whole or absent, and what a run needs to know to go on from one."""

import dataclasses
import json
import shlex
import shutil
import zipfile
from pathlib import Path

import adapter
import journal
from checks import PROJECTIONS, Refused, command, digest, flag, one_line

FACTS = "lab.json"
BEST = "best.json"  # in best-adapter/
WEIGHTS = "adapter_model.safetensors"
PARTS = (FACTS, "trainer_state.json", WEIGHTS, "optimizer.pt", "scheduler.pt")  # and the random state of each process
# another base model, LoRA or optimizer cannot take over what the checkpoint holds
FIXED = ("preset", "model", "load_in", "lora_r", "lora_alpha", "target_modules", "optim")
# where one of these changes, the held-out points so far are of other problems
PROBLEMS = ("task", "the task's file", "eval_problems", "seed", "max_operand", "worked_examples", "system")


def publish(written: Path, facts: dict, limit: int | None) -> Path:
    """Move a checkpoint that the trainer has written into `checkpoints/` beside it; keep the last `limit` of those.

    What lies in `checkpoints/` was written to its end, with `facts` (JSON) in it, and is on the disk.
    """
    from transformers.trainer_utils import rotate_checkpoints

    folder = written.parent / "checkpoints" / written.name
    folder.parent.mkdir(exist_ok=True)
    (written / FACTS).write_text(json.dumps(facts, indent=1))
    adapter.replace_folder(written, folder)
    rotate_checkpoints(str(folder.parent), save_total_limit=limit)
    return folder


def step_of(folder: Path) -> int:
    """The optimizer steps behind a checkpoint, from its name."""
    number = folder.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1


def last(run_dir: Path) -> Path | None:
    """The last whole checkpoint of a run's folder."""
    for folder in sorted((run_dir / "checkpoints").glob("checkpoint-*"), key=step_of, reverse=True):
        if what_is_wrong(folder) is None:
            return folder
    return None


def find(wanted: str, output_dir: Path) -> Path:
    """The checkpoint meant by --resume-from-checkpoint: a checkpoint, a run's folder, or `last` of all runs."""
    name = "--resume-from-checkpoint"
    if wanted == "last":
        found = [folder for run in output_dir.glob("*") if (folder := last(run))]
        if not found:
            raise Refused(f"{name} last: no whole checkpoint below {output_dir}; without the flag, a run starts anew")
        return max(found, key=lambda folder: (folder / FACTS).stat().st_mtime)
    folder = Path(wanted)
    if not folder.is_dir():
        near = [str(run) for run in output_dir.glob("*") if last(run)][-1:]
        raise Refused(f"{name} {wanted}: no such folder; " + (f"there is {near[0]}, or say last" if near else "say last"))
    if (folder / "checkpoints").is_dir() or not (folder / "trainer_state.json").is_file():
        if found := last(folder):
            return found
        raise Refused(f"{name} {wanted}: no whole checkpoint in there; say last for the last one of all runs")
    if wrong := what_is_wrong(folder):
        before = last(folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent)
        other = f"the last whole one: {before}" if before else "there is no whole one beside it"
        raise Refused(f"{name} {wanted}: not whole ({wrong}); {other}")
    return folder


def what_is_wrong(folder: Path) -> str | None:
    """Why a folder is no whole checkpoint, or None; reads its table of contents, not its tensors."""
    from safetensors import safe_open

    try:
        facts = json.loads((folder / FACTS).read_text()) if (folder / FACTS).is_file() else {}
        processes = facts.get("config", {}).get("processes", 1)
        states = ["rng_state.pth"] if processes == 1 else [f"rng_state_{i}.pth" for i in range(processes)]
        if missing := [part for part in (*PARTS, *states) if not (folder / part).is_file()]:
            return f"it lacks {', '.join(missing)}"
        json.loads((folder / "trainer_state.json").read_text())
        safe_open(folder / WEIGHTS, framework="numpy")
        for part in ("optimizer.pt", "scheduler.pt", *states):
            if not zipfile.is_zipfile(folder / part):
                return f"{part} is cut off"
    except Exception as error:
        return one_line(error)
    return None


def read_facts(folder: Path) -> dict:
    """What the run that wrote a checkpoint put down in it, see `facts_of_run`."""
    facts = json.loads((folder / FACTS).read_text())
    facts["config"] = {name: tuple(v) if isinstance(v, list) else v for name, v in facts["config"].items()}
    if "load_in_4bit" in facts["config"]:  # written before there was load_in
        facts["config"]["load_in"] = "4bit" if facts["config"].pop("load_in_4bit") else "16bit"
    if "fast_inference" in facts["config"]:  # or backend
        facts["config"]["backend"] = "vllm" if facts["config"].pop("fast_inference") else "unsloth"
    # as it was before there were these
    for name, value in (("steps_per_generation", None), ("lean_decode", False), ("processes", 1)):
        facts["config"].setdefault(name, value)
    return facts


def facts_of_run(config, run_id: str, run_dir: Path, origin: dict | None) -> dict:
    """What each checkpoint of a run holds beside the trainer's files; the held-out points go on from those of `origin`."""
    earlier = origin or {"held_out": [], "best": None}
    if origin and {change.partition(": ")[0] for change in origin["changes"]} & set(PROBLEMS):
        earlier = {"held_out": [], "best": None}
    elif origin and (newer := Path(origin["run_dir"]) / "best-adapter" / BEST).is_file():
        earlier = {**origin, "best": json.loads(newer.read_text())}  # it may have been written after the checkpoint
    return {
        "config": dataclasses.asdict(config),
        "task_file": digest(Path(config.task)),
        "run_id": run_id,
        "run_dir": str(run_dir.resolve()),
        "step": 0,
        "held_out": earlier["held_out"],  # [step, scores]
        "best": earlier["best"],  # step, name, score, folder
    }


def config_of(folder: Path, default):
    """The config that a checkpoint was written with; a field that it does not know has the value of `default`."""
    fields = {field.name for field in dataclasses.fields(default)} - {"force"}  # each start is forced by itself
    return dataclasses.replace(default, **{k: v for k, v in read_facts(folder)["config"].items() if k in fields})


def origin_of(config) -> dict:
    """The facts of the checkpoint that `config` resumes from, with `changes`; refuses a change that it cannot bear."""
    origin = read_facts(Path(config.resume_from_checkpoint))
    folder, step, each = Path(config.resume_from_checkpoint), origin["step"], config.steps_per_rollout
    own, name = rollout_of(origin["config"]), f"--resume-from-checkpoint {config.resume_from_checkpoint}"
    within = ""
    if step % own:  # its last rollout was not used up
        others = [f for f in folder.parent.glob("checkpoint-*") if step_of(f) % each == 0 and what_is_wrong(f) is None]
        near = f"{max(others, key=step_of)} can" if others else "start anew"
        within = f"step {step} lies within a rollout of {own} steps, whose answers are not kept; {near}"
    elif step % each:
        within = (
            f"step {step} is between rollouts of {own}, and not of {each} steps (--steps-per-generation, --num-iterations): "
            f"leave those as they were, or let the rollout's steps divide {step}"
        )
    if step >= config.max_steps and ended_well(Path(origin["run_dir"])):
        raise Refused(
            f"{name}: finished, {step} of {config.max_steps} steps are done; {within or f'--max-steps {2 * step} adds as many'}"
        )
    if step < config.max_steps and within:
        raise Refused(f"{name}: {within}")
    return {**origin, "changes": changes(origin, dataclasses.asdict(config), digest(Path(config.task)))}


def rollout_of(config: dict) -> int:
    """Optimizer steps from one rollout to the next, by the config in a checkpoint."""
    steps = config.get("gradient_accumulation_steps", 1)
    return (config.get("steps_per_generation") or steps) // steps * config.get("num_iterations", 1)


def changes(origin: dict, config: dict, task_file: str) -> list[str]:
    """What differs from the run that is gone on with, each as `name: old -> new`. Refuses what cannot differ."""
    old = origin["config"]
    for field in FIXED:
        before = old.get(field, PROJECTIONS if field == "target_modules" else config[field])
        if in_one_word(before) != in_one_word(config[field]):
            raise Refused(
                f"{flag(field)} {in_one_word(config[field])}: the checkpoint is of {in_one_word(before)}; leave it away, or "
                "start anew"
            )
    found = [f"{field}: {old[field]} -> {config[field]}" for field in differing(config, old)]
    if origin["task_file"] != task_file:
        found.append(f"the task's file: {origin['task_file']} -> {task_file}")
    return found


def in_one_word(value) -> str:
    """A value as text; names in any order are the same."""
    return " ".join(sorted(value)) if isinstance(value, tuple) else str(value)


def differing(config: dict, old: dict) -> list[str]:
    """The fields that have another value than in an older config: not what is about one start alone, nor what is fixed."""
    left_out = ("resume_from_checkpoint", "force", *FIXED)
    return [field for field in config if field in old and old[field] != config[field] and field not in left_out]


def ended_well(run_dir: Path) -> bool:
    """Whether a run was FINISHED, and not stopped between its last step and the evaluation; also where nobody can say."""
    try:
        items = journal.read(run_dir)[2]
    except Refused:
        return True
    return "FINISHED" in [item["status"] for item in items if item["kind"] == "status"]


def take_back(folder: Path, trainer) -> None:
    """Put adapter and history of a checkpoint into a trainer that has no step left to take."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import TrainerState

    set_peft_model_state_dict(trainer.model, load_file(folder / WEIGHTS))
    trainer.state = TrainerState.load_from_json(str(folder / "trainer_state.json"))


def delete_unfinished(run_dir: Path) -> None:
    """Make room: remove what is left of a checkpoint that could not be written to its end."""
    for folder in run_dir.glob("checkpoint-*"):
        shutil.rmtree(folder, ignore_errors=True)


def how_to_go_on(config, run_dir: Path, project: Path, origin: dict | None) -> str:
    """The command that resumes from the last checkpoint of a run, or from the one that it went on from itself."""
    folder, flags = last(run_dir), ""
    if folder is None and origin:
        folder, flags = config.resume_from_checkpoint, as_flags(dataclasses.asdict(config), origin["config"])
    if folder is None:
        return "no checkpoint is there: the same command starts anew"
    launcher = "python" if config.processes == 1 else f"torchrun --standalone --nproc-per-node {config.processes}"
    return f"go on with: {command(project, 'train.py', launcher)} --resume-from-checkpoint {shlex.quote(str(folder))}{flags}"


def as_flags(config: dict, old: dict) -> str:
    """What differs from an older config, as flags, each after a space."""
    words = []
    for name in differing(config, old):
        value = config[name]
        if name == "processes":  # which the launcher says
            continue
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            words.append(f"{flag(name)} {shlex.quote(str(value))}")
    return "".join(f" {word}" for word in words)
