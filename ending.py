"""How a run ends: what is said and recorded then, and with which code the script ends."""

import contextlib
import functools
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import checkpoints
import engine
import out_of_memory
import parallel
import record
from checks import Refused
from console import Console
from gpu import PeakMemory
from stopping import Stop, Stopped


@contextlib.contextmanager
def one_run(config, world, gpu, project: Path, store: str, run_dir: Path, origin: dict | None):
    """A run from its opened record to its last line, around its training; yields stop, console, run and peak.

    `peak` is gpu.PeakMemory, or None without a GPU; `run` a record.Record, or parallel.Unrecorded in all processes but one.
    Raises Refused where nothing has begun, and SystemExit with the code that README.md explains where it did not end well.
    """
    run, missing, status, code, speaks = None, None, "FAILED", 1, world.is_main
    peak = PeakMemory(gpu) if gpu else None
    go_on = functools.partial(checkpoints.how_to_go_on, config, run_dir, project, origin)

    def curves() -> str:
        return f"curves: {record.how_to_open(store, project)}, experiment {config.experiment}, run {run.run_id}"

    with Stop(launched=world.size > 1) as stop, Console(run_dir / world.log, heard=world.is_main) as console:
        stop.screen = console.kept[0] if world.is_main else console.screen.fileno()
        try:
            if world.is_main:
                run = record.Record(config, gpu, project, store, run_dir, origin)
            else:
                run = parallel.Unrecorded(world, run_dir, project, console, stop)
            world.sign_on(run_dir)
            stop.others_failure = functools.partial(others_failure, world, run_dir, console)
            stop.give_up = functools.partial(give_up, world, run, run_dir, console, go_on, curves)
            yield stop, console, run, peak
            status, code = "FINISHED", 0
        except BaseException as error:
            stop.leave()
            if run is None:  # nothing is on record, so nothing stays
                if world.is_main:
                    shutil.rmtree(run_dir)
                raise
            console.log_failure(error)
            why = world.what_others_said(run_dir, error)
            speaks = speak_for_all(world, run, run_dir, console, why)
            if speaks and not world.is_main:
                why = why or world.others_failure(run_dir)
            if why:
                error = why
            if isinstance(error, Stopped):
                status, code = "KILLED", 0 if stop.agreed and not world.is_main else 128 + error.signum
                console.say(f"stopped by {error}")
            else:
                memory = out_of_memory.measure(gpu, peak, run.kv_cache_gib, config.vllm_enable_sleep_mode)
                explanation = str(why or out_of_memory.what_failed(error, config, console.doing, memory))
                run.failure(error, explanation)
                if isinstance(error, Refused) and not stop.began:
                    raise
                console.say(f"failed in {console.doing}: {explanation}\nthe whole story: {console.log}")
        finally:
            stop.leave()
            if run:
                missing = run.end(status, console.say, stop)
                world.sign_off(run_dir)
            if peak:
                peak.stop()
            if status != "FAILED" or world.size == 1:
                engine.leave_process_group()
        if status != "FINISHED" and speaks:
            console.say(go_on())
        if world.is_main:
            console.say(curves())
        if missing:
            console.say(missing)
            code = code or 3
    if status == "FAILED" and world.size > 1:
        os._exit(code)  # others may be gone, whom leaving the group would wait for
    if code:
        sys.exit(code)


def speak_for_all(world, run, run_dir: Path, console, why) -> bool:
    """Whether this process says how the run ended, and records it: the first one, or where that was killed, the next.

    Where another's failure is `why` this one ends, the first one may be ending too, or just be dying: that is waited for.
    """
    if world.is_main:
        return True
    for _ in range(30):
        run.speaks = world.speaks(run_dir)
        if run.speaks or not why or not world.there(run_dir).get(0):
            break
        time.sleep(0.1)
    if run.speaks:
        console.speak_up()
    return run.speaks


def others_failure(world, run_dir: Path, console):
    """How another process has failed, or None; where it was the first one, the next is heard from here on."""
    if not world.is_main and world.speaks(run_dir):
        console.speak_up()
    return world.others_failure(run_dir)


def give_up(world, run, run_dir: Path, console, go_on, curves) -> None:
    """End this process, a while after a launcher's signal: it waits for one that is gone, or is in the midst of a long step.

    The launcher kills ten seconds later, so a slow store has four. `go_on` and `curves` return a run's last lines.
    """
    try:
        why = world.what_others_said(run_dir, None)
        if speak_for_all(world, run, run_dir, console, why):
            slow = f"stopped in {console.doing}, which takes longer than a launcher waits"
            console.say(f"failed in {console.doing}: {why}" if why else slow)
            with contextlib.suppress(Exception):  # a folder that is gone
                console.say(go_on())
        if why:
            run.failure(why, str(why))
        if world.is_main:
            console.say(curves())
            hurry = threading.Timer(4, run.journal.given_up.set)
            hurry.daemon = True
            hurry.start()
        if missing := run.end("FAILED" if why else "KILLED", console.say):
            console.say(missing)
        world.sign_off(run_dir)
    finally:
        os._exit(1)
