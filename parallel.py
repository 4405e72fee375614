"""The processes of a run, one card each: which of them this is, and what they do together. Without a launcher there is one.

    uv run torchrun --standalone --nproc-per-node 2 train.py

Each has the whole model, an engine and groups of its own; before each optimizer step all take the mean of their gradients.
The first one has screen, record, evaluations and files. README.md, "Several GPUs".
"""

import dataclasses
import functools
import json
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path

import psutil

import journal
from checks import Refused, one_line
from gpu import find_gpu
from stopping import Stopped

# what torchrun and accelerate launch set; with TORCHELASTIC_RUN_ID alone Unsloth takes a process for one of several
LAUNCHERS = """
    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE
"""
WAIT = timedelta(hours=2)  # for each other, as in an evaluation of the first one; a process that dies is noticed at once


@dataclasses.dataclass(frozen=True)
class Team:
    """`rank` of `size` processes, and their process ids in that order, once they have met."""

    rank: int = 0
    size: int = 1
    pids: list[int] = dataclasses.field(default_factory=list)

    @property
    def first(self) -> bool:
        """Whether this one talks, records, evaluates and saves."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print, where this is the first one."""
        if self.first:
            print(text, flush=True)

    def stamp(self) -> str:
        """The time of the start and a process id, the same in all: with a launcher, those of the launcher."""
        began, pid, again = time.time(), os.getpid(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if self.size > 1:
            pid = os.getppid()
            began = psutil.Process(pid).create_time()
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}-{pid}"
        return name if again == "0" else f"{name}-{again}"

    @property
    def log(self) -> str:
        """Name of the file for all that this process prints."""
        return "train.log" if self.first else f"train.{self.rank}.log"

    def make(self, run_dir: Path) -> None:
        """Make the folder of a run; all but the first one wait until that has, and has opened the record in it."""
        if self.first:
            return run_dir.mkdir(parents=True)
        while not (run_dir / journal.FILE).is_file():
            time.sleep(0.1)

    def environment(self, gpu) -> dict[str, str]:
        """What shows this process its own card alone, as device 0, as `torchrun --virtual-local-rank` would."""
        if gpu:
            return {"CUDA_VISIBLE_DEVICES": gpu.cuda_name} | ({"LOCAL_RANK": "0"} if self.size > 1 else {})
        # "cpu:0", which accelerate would take for it, is no name that torch.load can restore an optimizer to
        return {"ACCELERATE_TORCH_DEVICE": "cpu"} if self.size > 1 else {}

    def join(self, on_gpu: bool) -> None:
        """Meet the others, before the model loads: accelerate, Unsloth and vLLM go on with the group that they find.

        vLLM by itself would open a group of one process, and wait for it without end (unsloth#4559). What processes tell each
        other about the run goes through gloo, which notices at once where one is gone.
        """
        if self.size == 1:
            return
        import torch.distributed as dist

        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=WAIT)
        self.pids[:] = [int(row[0]) for row in self.gather([os.getpid()])]

    def gather(self, values: list[float]) -> list[list[float]]:
        """The values of each process, in the order of ranks; all must call it."""
        if self.size == 1:
            return [values]
        import torch
        import torch.distributed as dist

        rows = [torch.empty(len(values), dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(rows, torch.tensor(values, dtype=torch.float64))
        return [row.tolist() for row in rows]

    def wait(self) -> None:
        """For all to come here."""
        self.gather([0])

    def gone(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [rank for rank, pid in enumerate(self.pids) if not alive(pid)]

    def share_gradients(self, trainer) -> None:
        """Have each optimizer step take the mean of all processes' gradients, without torch's DistributedDataParallel.

        That takes part only in passes through itself. Unsloth's go around it, and a CPU's passes without a gradient would
        leave the others waiting. `trainer` is trl's; accelerate 1.15.0 wraps no model that is prepared for evaluation.
        """
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        accelerator, step = trainer.accelerator, trainer.training_step
        accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)
        trained = [p for p in trainer.model.parameters() if p.requires_grad]

        @functools.wraps(step)
        def shared(*arguments, **named):
            loss = step(*arguments, **named)
            if accelerator.sync_gradients:  # after the last pass of a step, before gradients are clipped
                for p in trained:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                flat = torch.cat([p.grad.flatten() for p in trained])
                dist.all_reduce(flat)
                flat /= self.size
                for p, part in zip(trained, flat.split([p.numel() for p in trained])):
                    p.grad.copy_(part.view_as(p))
            return loss

        trainer.training_step = shared

    def check_the_same(self, model) -> None:
        """Raise RuntimeError where the processes' adapters are not the same one any more."""
        sums = self.gather([sum(p.detach().double().sum().item() for p in model.parameters() if p.requires_grad)])
        if any(row != sums[0] for row in sums):
            raise RuntimeError(f"the processes' adapters have come apart (sums {[row[0] for row in sums]}): this is a bug")

    def what_others_said(self, run_dir: Path, error: BaseException | None) -> str | None:
        """Why another process has failed, where that is why this one ends: it lost the other in the midst of their work, was
        sent a signal for it by the launcher, or (without an error) does not get on."""
        stopped = isinstance(error, Stopped)
        if self.size == 1 or not (error is None or stopped or lost_another(error)):
            return None
        for _ in range(20):  # it may still be writing
            if told := sorted(run_dir.glob("failure.*.txt")):
                return told[0].read_text().partition("\n")[0]
            if stopped:
                return None
            if gone := self.gone():
                return f"process {gone[0]} is gone without a word (killed, perhaps for memory)"
            time.sleep(0.1)
        return None


class Unrecorded:
    """In place of a record.Record in all processes but the first: it keeps nothing but the reason of a failure."""

    kv_cache_gib, run_id, figures = 0.0, "", {}

    def __init__(self, team: Team, run_dir: Path, console):
        self.team, self.run_dir, self.console = team, run_dir, console

    def __getattr__(self, name):
        return lambda *arguments, **named: None

    def failure(self, error: BaseException, explained: str) -> None:
        """Say and write down what happened in here, for the first process and the launcher, unless another was the cause."""
        if isinstance(error, Refused) or lost_another(error):  # the first one says so too
            return
        said = f"process {self.team.rank} failed in {self.console.doing}: {one_line(explained)}"
        aside = self.run_dir / f".failure.{self.team.rank}"
        aside.write_text(f"{said}\n\n{''.join(traceback.format_exception(error))}")
        aside.rename(self.run_dir / f"failure.{self.team.rank}.txt")
        tell_launcher(said)
        os.write(self.console.kept[0], f"{said}\nthe whole story: {self.console.log}\n".encode())


def refuse_a_launcher(program: str) -> None:
    """For a script that starts others by itself."""
    if (size := find().size) > 1:
        raise Refused(f"WORLD_SIZE {size}: {program} starts its runs itself, one after the other; start it without a launcher")


def find() -> Team:
    """This process among those that a launcher has started. Refuses what it cannot have meant."""
    size, rank = os.environ.get("WORLD_SIZE") or "1", os.environ.get("RANK") or ""
    if size == "1":  # a launcher with one process is none
        for name in LAUNCHERS.split():
            os.environ.pop(name, None)
        return Team()
    local = os.environ.get("LOCAL_WORLD_SIZE") or size
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size) and os.environ.get("MASTER_PORT")):
        raise Refused(
            f"WORLD_SIZE {size} with RANK {rank or '(none)'}: these are a launcher's, and not all there; unset them, or start "
            "with: uv run torchrun --standalone --nproc-per-node 2 train.py"
        )
    if local != size:
        raise Refused(f"{size} processes, {local} of them here: a run has the cards of one host; --nnodes 1")
    return Team(int(rank), int(size))


def give_up(team: Team, run, run_dir: Path, console) -> None:
    """End this process, long enough after a signal: it waits for one that is gone, or is in the midst of a long step."""
    why = team.what_others_said(run_dir, None)
    if team.first:
        if why:
            run.failure(RuntimeError(why), why)
        slow = f"stopped in {console.doing}, which takes longer than a launcher waits"
        console.say(f"failed in {console.doing}: {why}" if why else slow)
        if missing := run.end("FAILED" if why else "KILLED", console.say):
            console.say(missing)
    os._exit(1)


def check_cards(team: Team) -> None:
    """Refuse more processes than visible cards; without any, all train on the CPU."""
    cards = sum(find_gpu(i)[0] is not None for i in range(team.size))
    if 0 < cards < team.size:
        raise Refused(f"{team.size} processes and {cards} visible cards (CUDA_VISIBLE_DEVICES): --nproc-per-node {cards}")


def let_the_first_speak() -> None:
    """Before an error that all processes have: the launcher ends the others soon after the first one has said it."""
    if (os.environ.get("RANK") or "0") != "0":
        time.sleep(5)


def tell_launcher(text: str) -> None:
    """Leave a line for the summary that torchrun prints of a failure (torch.distributed.elastic.multiprocessing.errors)."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))


def lost_another(error: BaseException) -> bool:
    """Whether an error says that another process was not there any more, in torch's words or gloo's."""
    import torch

    return isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
