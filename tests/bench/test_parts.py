"""The quick benchmarks run to their end: a figure in the docs is worth what its script is."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.grid


def test_a_part_prints_its_figures() -> None:
    command = [sys.executable, "-m", "tests.bench", "front", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| measured |" in done.stdout and "**" in done.stdout, done.stdout
