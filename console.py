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
        self.screen = os.fdopen(os.dup(1), "w", buffering=1)
        sys.stdout.reconfigure(line_buffering=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, kept in zip((1, 2), self.kept):
            os.dup2(kept, fd)

    def say(self, text: str) -> None:
        """Print to the screen and to the log."""
        print(text, file=self.screen)
        print(text)
