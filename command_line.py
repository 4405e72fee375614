"""The command line: a preset's values, or a checkpoint's, with the flags given by hand on top."""

import argparse
import contextlib
import dataclasses
import io
import re
from pathlib import Path

import checkpoints
from checks import Refused

RENAMED = {  # each with what it is now
    "--load-in-4bit": "--load-in 4bit",
    "--no-load-in-4bit": "--load-in 16bit",
    "--fast-inference": "--backend vllm",
    "--no-fast-inference": "--backend unsloth",
}


class Parser(argparse.ArgumentParser):
    """argparse's, which refuses in one line."""

    def error(self, message: str):
        raise Refused(f"{message}; {self.prog} --help lists what there is")


def parse(config_class, presets: dict, arguments: list[str], gpu, program: str = "train.py"):
    """The config of a run. Raises Refused, in tyro's words, for what is none, and for a checkpoint that cannot be found."""
    import tyro

    for word in arguments:
        if now := RENAMED.get(word.replace("_", "-")):
            raise Refused(f"{word}: it is {now} now; --help lists all")
    # a switch with three states, which tyro has no pair of flags for
    for i, word in enumerate(arguments):
        on = word.replace("_", "-") == "--enable-thinking" and arguments[i + 1 : i + 2] not in (["True"], ["False"], ["None"])
        if on or word.replace("_", "-") == "--no-enable-thinking":
            arguments = [*arguments[:i], f"--enable-thinking={on}", *arguments[i + 1 :]]
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", nargs="?")
    first.add_argument("--output-dir", "--output_dir", nargs="?")
    first.add_argument("--resume-from-checkpoint", "--resume_from_checkpoint", nargs="?")
    first = first.parse_known_args(arguments)[0]
    preset = first.preset or ("smollm2" if gpu is None else "qwen3-4b")
    default = presets.get(preset, presets["smollm2"])  # tyro refuses a preset that is none
    if gpu and preset == "smollm2":
        default = dataclasses.replace(default, backend="vllm")
    if wanted := first.resume_from_checkpoint:
        folder = checkpoints.find(wanted, Path(first.output_dir or default.output_dir))
        default = checkpoints.config_of(folder, default)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            config = tyro.cli(config_class, args=arguments, default=default, prog=program)
        return dataclasses.replace(config, resume_from_checkpoint=str(folder)) if wanted else config
    except SystemExit as stop:
        if not stop.code:
            raise
    lines = [line.strip("│╭╮╰╯─ ") for line in box.getvalue().splitlines()[1:]]  # the first one is the box's title
    said = re.split(" Argument helptext:| For full helptext", " ".join(filter(None, lines)))[0].rstrip(".")
    neither = r"no type matching \{None\}\|(\w+) could be instantiated from \[(.*?)\].*"
    said = re.sub(neither, r"\2 is neither None nor \1", said)
    raise Refused(said + "; --help lists all")
