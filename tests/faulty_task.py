"""A task for noise: it pays for letters, which differ within a group also where nothing was learned, or for nothing at all.

In the step named by AT, it does what DO says, each a thing that happens to real runs; of several processes that of rank ONLY,
while the others may sleep (OTHERS=sleep).
"""

import glob
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from task import make_dataset  # noqa: F401


def letters_reward(completions, trainer_state, prompts=(), **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    rewards = [sum(map(str.isalpha, text)) / 10 for text in texts]
    if trainer_state.max_steps == 0 and len(texts) > 1 and "SCORES" in os.environ:  # an evaluation: so many are right
        first, *rest = os.environ["SCORES"].split()
        os.environ["SCORES"] = " ".join(rest)
        if first == "fails":
            raise ValueError("nobody is there to judge")
        return [float(i < int(first)) for i in range(len(texts))]
    if "GROUPS" in os.environ and trainer_state.max_steps:
        asked = [str(prompt[-1]["content"]).replace(" ", "_") for prompt in prompts]
        with open(os.environ["GROUPS"], "a") as file:
            print(trainer_state.global_step + 1, os.environ["RANK"], *asked, file=file)
    here = os.environ.get("ONLY") in (None, os.environ.get("RANK"))  # of several processes, in which one
    now = str(trainer_state.global_step + 1) in os.environ.get("AT", "").split()
    if now and not here and os.environ.get("OTHERS") == "sleep":
        time.sleep(60)
    if now and here:
        what, _, where = os.environ["DO"].partition(" ")
        if what == "STOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what.startswith("SIG"):
            for i, names in enumerate(os.environ["DO"].split()):
                time.sleep(1.1 * (i > 0))
                for name in names.split("+"):
                    os.kill(os.getpid(), getattr(signal, name))
        elif what == "generating":  # SIGTERM, once the next generation is under way
            threading.Thread(target=stop_in_generation, args=(threading.get_ident(),), daemon=True).start()
        elif what == "exit":
            sys.exit("a reward that ends the process")
        elif what == "nan":
            return [float("nan"), *rewards[1:]]
        elif what == "infinite":
            return [3e38] * len(texts)
        elif what == "huge":
            import torch

            torch.empty(10**15)
        elif what == "kill":
            os.killpg(int(where), signal.SIGKILL)
        elif what == "freeze":
            os.killpg(int(where), signal.SIGSTOP)
        elif what == "delete":
            shutil.rmtree(glob.glob(where)[0])
        elif what == "file":  # a file where a folder was: nothing can be written below it, not even by root
            shutil.rmtree(where, ignore_errors=True)
            Path(where).write_text("")
        elif what == "fill":
            with open(f"{where}/filler", "wb", buffering=0) as file:
                for size in (2**20, 1):
                    try:
                        while file.write(b"x" * size):
                            pass
                    except OSError:
                        pass
        elif what == "read-only":
            subprocess.run(["mount", "--bind", where, where], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", where], check=True)
    return [0.0] * len(texts) if os.environ.get("PAY") == "nothing" and len(texts) > 1 else rewards


def stop_in_generation(thread):
    while True:
        frame, names = sys._current_frames()[thread], set()
        while frame:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        if "_generate_single_turn" in names:
            time.sleep(0.05)
            return os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)


REWARDS = [letters_reward]
EXAMPLES = [{"completion": "a, b", "rewards": [0.2]}]
