"""The processes of a run, one card each: which of them this is, and what they do together. Without a launcher there is one.

    uv run torchrun --standalone --nproc-per-node 2 train.py

Each has the whole model, an engine and groups of its own; before each optimizer step all take the mean of their gradients.
The first one has screen, record, evaluations and files. README.md, "Several GPUs".
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import psutil

import journal
import record
from checks import Refused, one_line
from gpu import find_gpu
from stopping import Stopped

# what torchrun and accelerate launch set; with TORCHELASTIC_RUN_ID alone Unsloth takes a process for one of several
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
             "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip
SENDING = 6  # seconds, of the ten between stopping.PATIENCE and a launcher's SIGKILL
WAIT = timedelta(hours=2)  # for each other, as in an evaluation of the first one; gloo notices at once one that dies, NCCL not
LOST = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited")  # gloo's words, and NCCL's


class OtherFailed(Exception):
    """Another process has failed, and this one ends for want of it; what that one wrote is a note."""


class ComeApart(Exception):
    """The processes train different adapters: a bug."""

    in_all_processes = True


@dataclasses.dataclass(frozen=True)
class World:
    """`rank` of `size` processes."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this one talks, records, evaluates and saves."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print, where this is the first one."""
        if self.is_main:
            print(text, flush=True)

    def stamp(self) -> str:
        """The time of the start and a process id, the same in all: with a launcher, those of the launcher."""
        began, pid = time.time(), os.getpid()
        if self.size > 1:
            pid = os.getppid()
            began = psutil.Process(pid).create_time()
        return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}-{pid}"

    @property
    def log(self) -> str:
        """Name of the file for all that this process prints."""
        return "train.log" if self.is_main else f"train.{self.rank}.log"

    def make(self, run_dir: Path) -> None:
        """Make the folder of a run; all but the first one wait until that has, and has opened the record in it."""
        if self.is_main:
            return run_dir.mkdir(parents=True)
        for _ in range(1200):
            if (run_dir / journal.FILE).is_file():
                return
            time.sleep(0.1)
        raise Refused(f"process 0 has not opened its record in {run_dir} within 120 s; all processes need one launcher")

    def environment(self, gpu) -> dict[str, str]:
        """What shows this process its own card alone, as device 0, as `torchrun --virtual-local-rank` would.

        NCCL has 4 channels, unless the environment says otherwise: between two H200s by itself it takes 0.82 GiB for more of
        them, instead of 0.42, and saves a millisecond of a step (0.13 GB of gradients in 0.5 instead of 1.8 ms).
        """
        if gpu:
            several = {"LOCAL_RANK": "0", "NCCL_MAX_NCHANNELS": os.environ.get("NCCL_MAX_NCHANNELS", "4")}
            return {"CUDA_VISIBLE_DEVICES": gpu.cuda_name} | (several if self.size > 1 else {})
        # "cpu:0", which accelerate would take for it, is no name that torch.load can restore an optimizer to
        return {"ACCELERATE_TORCH_DEVICE": "cpu"} if self.size > 1 else {}

    def join(self, on_gpu: bool, say) -> None:
        """Meet the others, before the model loads: accelerate, Unsloth and vLLM go on with the group that they find.

        vLLM by itself would open a group of one process, and wait for it without end (unsloth#4559). What processes tell each
        other about the run goes through gloo, which notices at once where one is gone.
        """
        if self.size == 1:
            return
        import torch.distributed as dist

        wait = f"still waiting for {self.size - 1} of {self.size} processes; without a launcher: unset WORLD_SIZE RANK"
        timer = threading.Timer(30, say, [wait])
        timer.daemon = True
        timer.start()
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=WAIT)
        self.wait()
        timer.cancel()

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

    def sign_on(self, run_dir: Path) -> None:
        """Leave this process's id, for the others to see whether it lives."""
        if self.size > 1:
            aside = run_dir / f".pid.{self.rank}"
            aside.write_text(str(os.getpid()))
            aside.rename(run_dir / f".process.{self.rank}")

    def sign_off(self, run_dir: Path) -> None:
        """So that nobody takes this process for a killed one."""
        if self.size > 1:
            with contextlib.suppress(OSError):  # a disk that has become read-only
                (run_dir / f".process.{self.rank}").unlink(missing_ok=True)

    def there(self, run_dir: Path) -> dict[int, bool]:
        """The ranks that have signed on and not off, each with whether its process lives.

        The last one first: who ends the record for process 0 signs that off before itself.
        """
        found = {}
        for rank in reversed(range(self.size)):
            with contextlib.suppress(OSError, ValueError):
                found[rank] = alive(int((run_dir / f".process.{rank}").read_text()))
        if found.get(0) is False and journal.has_ended(run_dir):  # in a library's depths, as a vLLM that does not start
            del found[0]
        return found

    def speaks(self, run_dir: Path) -> bool:
        """Whether it is this one's part to end the record: the first one's, or where that was killed, the next one's."""
        there = self.there(run_dir)
        return self.is_main or there.get(0) is False and not any(there.get(rank) for rank in range(self.rank))

    def has_lost_another(self, error: BaseException) -> bool:
        """Whether an error says that another process was not there any more."""
        return self.size > 1 and isinstance(error, RuntimeError) and LOST.search(str(error)) is not None

    def share_gradients(self, trainer) -> None:
        """Have each optimizer step take the mean of all processes' gradients, without torch's DistributedDataParallel.

        That takes part only in passes through itself: Unsloth's go around it, and mend that by themselves, and a CPU's passes
        without a gradient would leave the others waiting. This is one way for all. `trainer` is trl's; accelerate 1.15.0 wraps
        no model that is prepared for evaluation.
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
        """Wait for all processes, and raise ComeApart where their adapters differ in a bit."""
        if self.size == 1:
            return
        import torch

        trained = [p.detach().float().contiguous().view(torch.int32) for p in model.parameters() if p.requires_grad]
        sums = [row[0] for row in self.gather([sum(p.sum(dtype=torch.int64).item() for p in trained) % 2**48])]
        if len(set(sums)) > 1:
            raise ComeApart(f"the processes' adapters differ (sums of their bits {sums}): please report it with train.log")

    def what_others_said(self, run_dir: Path, error: BaseException | None) -> OtherFailed | None:
        """That another process has failed, where this one ends for that: it lost the other in the midst of their work, was sent
        a signal for it by the launcher, or (without an error) does not get on."""
        stopped = isinstance(error, Stopped)
        if self.size == 1 or not (error is None or stopped or self.has_lost_another(error)):
            return None
        for _ in range(20):  # it may still be writing
            if (found := self.others_failure(run_dir)) or stopped:
                return found
            time.sleep(0.1)
        return None

    def others_failure(self, run_dir: Path) -> OtherFailed | None:
        """How another process has failed, as far as can be seen now."""
        with contextlib.suppress(OSError):
            if told := sorted(run_dir.glob("failure.*.txt")):
                story = told[0].read_text()
                found = OtherFailed(story.partition("\n")[0])
                found.add_note(story)
                return found
        for rank, lives in sorted(self.there(run_dir).items()):
            if not lives:
                return OtherFailed(f"process {rank} has ended without a word: killed, perhaps for memory")
        return None


class Unrecorded:
    """In place of a record.Record in all processes but the first: it keeps nothing but how this one ended.

    Where the first one was killed and this one `speaks`, it also ends the record.
    """

    kv_cache_gib, run_id, speaks = 0.0, "", False

    def __init__(self, world: World, run_dir: Path, project: Path, console, stop):
        self.world, self.run_dir, self.project, self.console, self.stop = world, run_dir, project, console, stop
        self.others = "process 0 has ended without a word"

    def __getattr__(self, name):
        if not callable(getattr(record.Record, name, None)):
            raise AttributeError(f"record.Record has no method {name}")
        return lambda *arguments, **named: None

    def loaded(self, model) -> None:
        if engine := getattr(model, "vllm_engine", None):
            self.kv_cache_gib = record.engine_figures(engine)["kv_cache_gib"]

    def failure(self, error: BaseException, explained: str) -> None:
        """Say and write down what happened in here, for the first process and the launcher, unless that was another's end."""
        if isinstance(error, OtherFailed):
            self.others = explained
        if self.world.has_lost_another(error) or isinstance(error, OtherFailed):
            return
        said = f"process {self.world.rank} failed in {self.console.doing}: {one_line(explained or str(error))}"
        refused_to_all = isinstance(error, Refused) and not self.stop.began
        with contextlib.suppress(OSError):
            if not (refused_to_all or getattr(error, "in_all_processes", False)):  # which the first one says too
                os.write(self.console.kept[0], f"{said}\nthe whole story: {self.console.log}\n".encode())
        with contextlib.suppress(OSError):
            aside = self.run_dir / f".failure.{self.world.rank}"
            aside.write_text(f"{said}\n\n{''.join(traceback.format_exception(error))}")
            aside.rename(self.run_dir / f"failure.{self.world.rank}.txt")
        with contextlib.suppress(OSError):
            tell_launcher(said)

    def end(self, status: str, say, stop=None) -> str | None:
        """Where this one speaks, write down that the run FAILED, and send what the first one has not, for SENDING seconds.

        Returns in words what came of it, or None.
        """
        if not self.speaks:
            return None
        said = []

        def send():
            try:
                said.append(record.upload(self.run_dir, self.project))
            except Exception as error:
                said.append(f"NOT RECORDED ({one_line(error)[:200]}).\n{later}")

        later = record.how_to_send(self.run_dir, self.project)
        try:
            journal.end_for_another(self.run_dir, f"OtherFailed: {one_line(self.others)}", self.others)
        except OSError as error:
            return f"NOT RECORDED ({error.strerror}): the run stays RUNNING until there is room for its end.\n{later}"
        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        sending.join(SENDING)
        with contextlib.suppress(OSError):
            (self.run_dir / ".process.0").unlink(missing_ok=True)  # the next one need not do it again
        return said[0] if said else f"NOT RECORDED yet: not sent within {SENDING:g} s.\n{later}"


def refuse_a_launcher(program: str) -> None:
    """For a script that starts others by itself."""
    if (size := find().size) > 1:
        raise Refused(f"WORLD_SIZE {size}: {program} starts its runs itself, one after the other; start it without a launcher")


def find() -> World:
    """This process among those that a launcher has started. Refuses what it cannot have meant."""
    size, rank = os.environ.get("WORLD_SIZE") or "1", os.environ.get("RANK") or ""
    if size == "1":  # a launcher with one process is none
        for name in LAUNCHERS:
            os.environ.pop(name, None)
        return World()
    local = os.environ.get("LOCAL_WORLD_SIZE") or size
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size) and os.environ.get("MASTER_PORT")):
        raise Refused(
            f"WORLD_SIZE {size} with RANK {rank or '(none)'}: these are a launcher's, and not all there; unset them, or start "
            "with: uv run torchrun --standalone --nproc-per-node 2 train.py"
        )
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true"):
            raise Refused(f"ACCELERATE_USE_{name}: each process holds the whole model; accelerate launch --multi_gpu")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise Refused("--max-restarts: leave it away; a run that failed prints the command that goes on with it")
    if local != size:
        raise Refused(f"{size} processes, {local} of them here: a run has the cards of one host; --nnodes 1")
    return World(int(rank), int(size))


def cards(world: World) -> list[tuple]:
    """For each process what gpu.find_gpu says: its card, or None for all, which then train on the CPU. Refuses fewer cards than
    processes.

    Every process looks at all of them, so that what one card cannot do is refused in all.
    """
    found = [find_gpu(i) for i in range(world.size)]
    several = len({card.uuid for card, _ in found if card})
    if 0 < several < world.size:
        raise Refused(f"{world.size} processes and {several} visible cards (CUDA_VISIBLE_DEVICES): --nproc-per-node {several}")
    return found


def let_the_first_speak() -> str:
    """Before an error that all processes have, wait for the launcher, which ends the others soon after the first one has said
    it; returns which process this is, for where it is the only one."""
    rank = os.environ.get("RANK") or "0"
    if rank == "0":
        return ""
    time.sleep(5)
    return f"process {rank}: "


def tell_launcher(text: str) -> None:
    """Leave a line for the summary that torchrun prints of a failure (torch.distributed.elastic.multiprocessing.errors)."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
