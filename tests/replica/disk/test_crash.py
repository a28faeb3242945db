"""A real process is killed while it writes, again and again."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.replica.disk.disks import opened, read, record


@pytest.mark.parametrize("rounds", [8, pytest.param(100, marks=pytest.mark.grid)])
def test_what_a_killed_process_had_written_is_found(tmp_path: Path, rounds: int) -> None:
    command = [sys.executable, "-m", "tests.replica.disk.writer", str(tmp_path)]
    chance = random.Random(7)
    held: dict[int, int] = {}  # the identity in each slot
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        for _ in range(rounds):
            writer.stdin.write("\n")
            writer.stdin.flush()
            child = int(writer.stdout.readline())
            lines = [writer.stdout.readline() for _ in range(chance.randrange(1, 40))]
            os.kill(child, signal.SIGKILL)
            lines += iter(writer.stdout.readline, "dead\n")
            said = [(int(slot), int(identity)) for slot, identity in map(str.split, lines)]
            held = what_is_left(tmp_path, held | dict(said), last=said[-1][1])
        writer.stdin.close()


def what_is_left(folder: Path, held: dict[int, int], last: int) -> dict[int, int]:
    """All that the process said it wrote; of the one record after that either nothing, or all, or a torn one."""
    with opened(folder) as file:
        found = {slot: each.identity for slot, each in file.recover().records}
        unsaid = found.items() - held.items()
        assert held.keys() <= found.keys()
        assert all(identity == last + 1 and read(file, slot, record(identity)) for slot, identity in unsaid)
        torn = {slot for slot, identity in found.items() if not read(file, slot, record(identity))}
        assert len(unsaid) + len(torn) <= 1
        assert all(file.erase(slot) for slot in torn)  # as the tier does
        return {slot: identity for slot, identity in found.items() if slot not in torn}
