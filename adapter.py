"""The trained adapter: saved aside and renamed, elsewhere where its disk is full, and looked at afterwards."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

from checks import one_line


class BadAdapter(Exception):
    """What was saved is not what was trained."""


def replace_folder(aside: Path, folder: Path) -> None:
    """Put `aside` in the place of `folder`, which has either its old content or its new one, or for an instant neither."""
    for file in filter(Path.is_file, aside.rglob("*")):
        with open(file, "rb") as content:
            os.fsync(content.fileno())
    old = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder, old)
    os.replace(aside, folder)
    parent = os.open(folder.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)
    shutil.rmtree(old, ignore_errors=True)


def save(model, folder: Path) -> None:
    """Write the LoRA's tensors and config (about 2 bytes to 4 a parameter), so that `folder` is whole or absent."""
    aside = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        model.save_pretrained(str(aside))
        replace_folder(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def save_somewhere(model, folder: Path, console) -> Path | None:
    """Save to `folder`, or where that fails to the first place with room, saying what failed; None where there is none."""
    name = f"{folder.parent.name}-{folder.name}"
    elsewhere = (Path.cwd, Path.home, lambda: Path(tempfile.gettempdir()), lambda: Path("/dev/shm"))
    for place in (None, *elsewhere):
        kept = None
        try:
            kept = place() / name if place else folder  # there may be no working folder any more, and no home
            save(model, kept)
            return kept
        except Exception as error:  # OSError, or what safetensors makes of one
            console.say(f"adapter not saved{f' in {kept}' if kept else ''}: {one_line(error)}")
    return None


def rescue(model, folder: Path, step: int, console, run) -> None:
    """Save and record what was trained until a failure; where that fails too, it is said."""
    if kept := save_somewhere(model, folder, console):
        console.say(f"adapter after step {step}: {kept.resolve()}")
        run.adapter(kept)


def keep(model, folder: Path, base: str, history: list[dict], config, console, run) -> None:
    """Save, record and look at the trained adapter; raises OSError where it could only be saved elsewhere, and BadAdapter."""
    kept = save_somewhere(model, folder, console)
    if kept:
        run.adapter(kept)
    if kept != folder:
        raise OSError(f"{folder} could not be written; the adapter is in {kept}")
    largest_b = check(folder, base, history, config.mask_truncated_completions, config.steps_per_rollout)
    run.metrics({"adapter_largest_b": largest_b})
    learned = f"largest entry of B {largest_b:.2g}"
    if not largest_b:
        learned = "B is all 0: nothing was learned; no group had spread, or the learning rate was 0 (warm-up)"
    console.say(f"adapter: {folder.resolve()} ({learned})")


def check(folder: Path, base: str, history: list[dict], masked: bool, steps_per_rollout: int = 1) -> float:
    """Read a saved adapter; returns the largest entry of its B matrices, which start at 0.

    `history` is the trainer's log, a dict a step; `masked`: completions that were cut off were left out of the loss. Raises
    BadAdapter for a file without LoRA tensors, an entry that is not finite, another base model than `base`, or B all 0
    although the policy should have moved.
    """
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    b = {name: tensor for name, tensor in tensors.items() if "lora_B" in name}
    if not b or len(b) * 2 != len(tensors):
        raise BadAdapter(f"{folder}: {len(tensors)} tensors, {len(b)} of them a B; each A has its B in a LoRA")
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise BadAdapter(f"{folder}: {len(bad)} of {len(tensors)} tensors hold NaN or infinity, the first {bad[0]}")
    named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    if named != base:
        raise BadAdapter(f"{folder}: adapter_config.json names {named} as its base model, and {base} was trained")
    largest = max(float(tensor.abs().max()) for tensor in b.values())
    steps = steps_that_should_have_moved(history, masked, steps_per_rollout)
    if steps and not largest:
        raise BadAdapter(
            f"{folder}: B is all 0, although groups had spread in {len(steps)} steps (the first: {steps[0]}): the gradient "
            "does not reach the adapter"
        )
    return largest


def disk_trouble(error: BaseException) -> bool:
    """Whether a disk was full, read-only or gone: an errno, or its text in what safetensors, torch and pandas make of one."""
    texts = ("No space left", "Read-only file system", "Disk quota", "non-existent directory", "file write failed")
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EROFS, errno.EDQUOT) or any(t in str(error) for t in texts):
            return True
        error = error.__cause__ or error.__context__
    return False


def steps_that_should_have_moved(history: list[dict], masked: bool, steps_per_rollout: int) -> list[int]:
    """Steps with a group whose rewards differ, and a learning rate; where `masked`, only steps with no answer cut off.

    A rollout's groups are mixed over its steps, so it counts once all of them are taken.
    """
    last = max((log["step"] for log in history), default=0)
    return [
        log["step"]
        for log in history
        if log["step"] + steps_per_rollout - 1 <= last
        and is_below_1(log.get("frac_reward_zero_std"))
        and (log.get("learning_rate") or 0) > 0
        and not (masked and log.get("completions/clipped_ratio"))
    ]


def is_below_1(share: float | None) -> bool:
    return share is not None and share < 1  # not where it is NaN
