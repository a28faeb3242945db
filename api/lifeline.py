"""A child that dies with its parent, however the parent ends."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; at once if that is over already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if orphaned(parent_pid):
        os._exit(1)


def orphaned(parent_pid: int) -> bool:
    """Whether the parent is gone; to be asked now and then where the kernel does not tell."""
    return os.getppid() != parent_pid
