"""Ctrl-C, SIGTERM and a closed terminal: heard at the end of a step, and at once where it is said twice."""

import contextlib
import faulthandler
import os
import signal
import threading

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "a closed terminal"}


class Stopped(BaseException):
    """A signal ended the run; like KeyboardInterrupt, no `except Exception` of a library holds it up."""

    def __init__(self, signum: int):
        super().__init__(NAMES[signum])
        self.signum = signum


class Stop:
    """While it is open, the first signal during `between_steps` only asks: `asked` is then its number.

    Everywhere else, and the second time, it raises Stopped. Once that has reached the script (`caught`), one more signal
    ends the process on the spot. A signal that the parent set to be ignored (nohup, a job in the background) stays so.
    """

    def __init__(self):
        self.asked: int | None = None
        self.caught = False
        self.patient = False
        self.screen = 2  # file descriptor
        self.before = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # Python hands signals to no other
            for signum in NAMES:
                if signal.getsignal(signum) != signal.SIG_IGN:
                    self.before[signum] = signal.signal(signum, self.hear)
        return self

    def __exit__(self, *error):
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def hear(self, signum, frame):
        if self.caught:
            os._exit(128 + signum)
        first, self.asked = self.asked is None, self.asked or signum
        if not (first and self.patient):
            raise Stopped(self.asked)
        with contextlib.suppress(OSError):  # not print: the signal may have come in the middle of one
            os.write(self.screen, f"{NAMES[signum]}: stopping once this step is done; once more stops at once\n".encode())

    @contextlib.contextmanager
    def between_steps(self):
        """Training: a signal waits for the end of the step."""
        self.raise_if_asked()
        self.patient = True
        try:
            yield
        finally:
            self.patient = False

    def raise_if_asked(self):
        """For a library that has swallowed the exception with a bare `except:`, as Unsloth's loader does."""
        if self.asked is not None:
            raise Stopped(self.asked)


@contextlib.contextmanager
def time_limit(seconds: float, give_up):
    """Call `give_up` from another thread, where Python or C hangs in this one, and end the process with 1.

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
