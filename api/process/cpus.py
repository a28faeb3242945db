"""The processors that this process may use."""

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container has its limit here


def usable_cpus(quota: Path = QUOTA) -> int:
    """The CPUs that this process may use at once, rounded down."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time_us, period_us = quota.read_text().split()
        limit = cpus if time_us == "max" else int(time_us) // int(period_us)
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup v2
        return cpus
    return max(1, min(cpus, limit))
