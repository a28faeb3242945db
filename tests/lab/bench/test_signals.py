"""A second signal while the first is still handled."""

import os
import signal
import subprocess
import sys

import pytest

STUBBORN = """
import asyncio, uvloop
from lab.bench.measure import Stop, _guarded

async def work():
    print("works", flush=True)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("ends", flush=True)
        await asyncio.sleep(60)

uvloop.run(_guarded(Stop(), work()))
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_what_does_not_end(first: signal.Signals, second: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "works\n"
            os.kill(process.pid, first)
            assert process.stdout.readline() == "ends\n"
            os.kill(process.pid, second)
            assert process.wait(10) == -second
        finally:
            process.kill()
