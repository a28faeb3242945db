"""Child processes: the command of one of our modules, and how a child dies with its parent, however that ends."""

import ctypes
import os
import signal
import sys

from api.process.settings import Unusable

PR_SET_PDEATHSIG = 1

# A parent's pid, set for a child that must not outlive it: the child may start after the parent died.
PARENT_VARIABLE = "WARMROUTE_PARENT_PID"


def current_folder() -> str | None:
    """Return the current folder; None if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


_SAFE = () if "" in sys.path or current_folder() in sys.path else ("-P",)  # asked once, while it is there


def module(name: str, *arguments: str) -> list[str]:
    """The child sees the current folder as a place of modules only if this process does."""
    return [sys.executable, *_SAFE, "-m", name, *arguments]


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent's thread ends; exit at once if it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if orphaned(parent_pid):
        os._exit(1)


def orphaned(parent_pid: int) -> bool:
    """Tell whether the parent is gone; for polling, where the kernel does not signal it."""
    return os.getppid() != parent_pid


def parent_pid() -> int:
    named = os.environ.get(PARENT_VARIABLE, str(os.getppid()))
    if not (named.isascii() and named.isdigit()):
        raise Unusable(f"{PARENT_VARIABLE} in the environment is {named!r}; make it the parent's pid, or unset it")
    return int(named)
