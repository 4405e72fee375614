"""The screen for our few lines, the log for all that the libraries print."""

import os
import sys
import traceback
from pathlib import Path


class Console:
    """While it is open, our few lines go to the screen and all that the libraries print goes to the log.

    File descriptors 1 and 2 are moved, since vLLM and CUDA print past Python's sys.stdout. `doing` says what the script is
    at, for a message when it fails there. One that is not `heard` says its lines to the log alone.
    """

    def __init__(self, log: Path, heard: bool = True):
        self.log, self.doing = log, "starting"
        self.kept = os.dup(1), os.dup(2)
        screen = os.dup(1) if heard else os.open(os.devnull, os.O_WRONLY)
        self.screen = os.fdopen(screen, "w", buffering=1, errors="backslashreplace")
        # what libraries print may be in any script, and a locale that knows none must not end a run
        sys.stdout.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for stream, fd, kept in zip((sys.stdout, sys.stderr), (1, 2), self.kept):
            try:
                stream.flush()
            except OSError:  # a full disk again: what is left must not come out on the screen
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
                stream.flush()
            os.dup2(kept, fd)
            os.close(kept)
        self.screen.close()

    def speak_up(self) -> None:
        """From here on be heard, also by whoever writes to the screen's file descriptor."""
        os.dup2(self.kept[0], self.screen.fileno())

    def log_failure(self, error: BaseException) -> None:
        """The traceback into the log; where its disk is full, nothing that the libraries print from now on can fail there."""
        try:
            traceback.print_exception(error)
            sys.stdout.flush()
        except OSError:
            for fd in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)

    def say(self, text: str) -> None:
        """Print to the screen and to the log; a screen that has gone (`| head`, ssh) and a full disk stop nothing."""
        try:
            print(text, file=self.screen)
        except OSError:
            self.screen = open(os.devnull, "w")
        try:
            print(text)
        except OSError:
            pass


def open_closed_streams() -> None:
    """Where the shell has closed stdout or stderr (`>&-`), open them onto nothing: the libraries count on both."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, fd)
            setattr(sys, name, open(fd, "w", closefd=False))
