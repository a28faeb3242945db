"""The output of `warmroute up`, line by line on standard output."""

import os
import sys


def say(text: str) -> None:
    """Print; a terminal that was closed or a reader that went away ends what is said, never the fleet."""
    try:
        print(text, flush=True)
    except OSError:
        mute_stdout()


def mute_stdout() -> None:
    """Point stdout at nothing: what is buffered would fail again, at the latest in the interpreter's last flush."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
