"""The screen for our few lines, the log for all that the libraries print."""

import os
import sys
from pathlib import Path


class Console:
    """While it is open, our few lines go to the screen and all that the libraries print goes to the log.

    File descriptors 1 and 2 are moved, since vLLM and CUDA print past Python's sys.stdout.
    """

    def __init__(self, log: Path):
        self.kept = os.dup(1), os.dup(2)
        self.screen = os.fdopen(os.dup(1), "w", buffering=1, errors="backslashreplace")
        sys.stdout.reconfigure(line_buffering=True)
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, kept in zip((1, 2), self.kept):
            os.dup2(kept, fd)
            os.close(kept)
        self.screen.close()

    def say(self, text: str) -> None:
        """Print to the screen and to the log; a screen that has gone (`| head`) stops nothing."""
        try:
            print(text, file=self.screen)
        except BrokenPipeError:
            self.screen = open(os.devnull, "w")
        print(text)
