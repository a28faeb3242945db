"""Replicas that one machine takes."""

from router.process.server import usable_cpus

PER_CPU = 8  # more starve each other; a guard against slips of the keyboard, which --force overrides


def room_here() -> int:
    return PER_CPU * usable_cpus()
