"""Ctrl-C, SIGTERM and a closed terminal: heard at the end of a step, and at once where it is said twice."""

import contextlib
import faulthandler
import math
import os
import signal
import socket
import threading
import time

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "a closed terminal"}
PATIENCE = 20  # seconds after a signal from a launcher, which kills after 30 (torch 2.11.0, multiprocessing/api.py)


class Stopped(BaseException):
    """A signal ended the run; like KeyboardInterrupt, no `except Exception` of a library holds it up."""

    def __init__(self, signum: int):
        super().__init__(NAMES[signum])
        self.signum = signum


class Stop:
    """While it is open, the first signal during `training` only asks: `asked` is then its number.

    Everywhere else, and the second time, it raises Stopped. Once the script is `leaving`, a signal calls `hurry` where there
    is one, and the next ends the process on the spot. What follows a signal within a second is the same one: a closing
    terminal and `timeout` reach the script and uv, which passes it on. A signal that was ignored when the script was started
    (nohup, a job in the background) stays so.

    A `launched` process is sent SIGTERM also when another has ended, and killed half a minute later. The first signal then
    hurries nothing by itself, but PATIENCE later `give_up` is called from a thread of its own: the main thread may wait for
    the one that is gone, in a library that lets it hear nothing. Where the main thread is `leave`-ing, it is `hurry`.
    """

    def __init__(self, launched: bool = False):
        self.asked: int | None = None
        self.began = False  # training
        self.agreed = False  # with all processes of the run, that it stops
        self.finishes_step = False
        self.waits_for = "this step"
        self.leaving = False
        self.hurry = None
        self.launched, self.give_up = launched, None
        self.others_failure = lambda: None  # how another process has failed, or None
        self.over = threading.Event()
        self.last_word = threading.Lock()  # of the thread that ends the run
        self.screen = 2  # file descriptor
        self.heard = -math.inf
        self.before = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # Python hands signals to no other
            for signum in NAMES:
                if signal.getsignal(signum) != signal.SIG_IGN:
                    self.before[signum] = signal.signal(signum, self.hear)
            if self.launched:
                self.read, self.write = socket.socketpair()
                self.write.setblocking(False)
                self.wakeup_before = signal.set_wakeup_fd(self.write.fileno(), warn_on_full_buffer=False)
                threading.Thread(target=self.listen, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.over.set()
        if self.launched and self.before:
            signal.set_wakeup_fd(self.wakeup_before)
            self.write.close()  # which ends the thread
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def listen(self):
        launcher, heard = os.getppid(), b"\0"
        self.read.settimeout(1)
        with self.read:
            while heard and heard[0] not in NAMES:
                try:
                    heard = self.read.recv(1)
                except TimeoutError:
                    if os.getppid() != launcher:  # killed: nobody else ends this process then
                        os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(Exception):  # whatever becomes of these words, what follows must not end with them
            if not self.over.wait(0.5) and self.finishes_step and not self.leaving:
                if why := self.others_failure():
                    self.say(f"{why}; this one ends in about {PATIENCE:g} s")
                else:
                    self.say_what_it_waits_for(self.asked or heard[0])
        if self.over.wait(PATIENCE):
            return
        if self.give_up and self.last_word.acquire(blocking=False):
            self.give_up()
        while not self.over.wait(0.1):
            if hurry := self.hurry:
                return hurry()

    def leave(self):
        """From here on this thread ends the run; where another one does already, it waits until that ends the process."""
        if not self.leaving:
            self.last_word.acquire()
            self.leaving = True

    def hear(self, signum, frame):
        if time.monotonic() - self.heard < 1:
            return
        again, self.heard = math.isfinite(self.heard), time.monotonic()
        if self.leaving and self.launched and not again:
            return
        if self.leaving:
            if self.hurry is None:
                os._exit(128 + signum)
            hurry, self.hurry = self.hurry, None
            hurry()
            return
        self.asked = self.asked or signum
        if again or not self.finishes_step:
            raise Stopped(self.asked)
        if not self.launched:
            self.say_what_it_waits_for(signum)

    def say_what_it_waits_for(self, signum: int):
        self.say(f"{NAMES[signum]}: stopping once {self.waits_for} is done; once more stops at once")

    def say(self, text: str):
        with contextlib.suppress(OSError):  # not print: the signal may have come in the middle of one
            os.write(self.screen, f"{text}\n".encode())

    @contextlib.contextmanager
    def training(self, steps_per_rollout: int = 1):
        """A signal waits for the end of the step, or of the rollout that it belongs to."""
        self.raise_if_asked()
        if steps_per_rollout > 1:
            self.waits_for = f"this rollout of {steps_per_rollout} steps"
        self.began = self.finishes_step = True
        try:
            yield
        finally:
            self.finishes_step = False

    def raise_if_asked(self):
        """For a library that has swallowed the exception with a bare `except:`, as Unsloth's loader does."""
        if self.asked is not None:
            raise Stopped(self.asked)


@contextlib.contextmanager
def time_limit(seconds: float, give_up):
    """Call `give_up` from another thread, where this one hangs (without holding Python's lock), and end the process with 1.

    The stacks of all threads go to stderr first.
    """

    def end():
        faulthandler.dump_traceback(all_threads=True)
        try:
            give_up()
        finally:
            os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
