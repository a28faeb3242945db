"""The output of `warmroute up`, line by line on standard output."""

import os
import sys


def say(text: str) -> None:
    """Print; a closed terminal or a vanished reader ends the output, never the fleet."""
    try:
        print(text, flush=True)
    except OSError:
        mute_stdout()


def mute_stdout() -> None:
    """Point stdout at nothing, or buffered output would fail again in the interpreter's last flush."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
