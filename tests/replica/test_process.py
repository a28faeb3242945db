"""The engine's process, beside computing."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from events.blocks import pack_tokens
from replica.messages import Sampling, Stop, Submit, SubmitAll, encode
from replica.process import Loop, cpu_wait_s, warn_of_too_much
from tests.replica.engines import engine


def test_nothing_more_is_computed_after_a_stop() -> None:
    """A step may take seconds, and a stop waits for its end."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as mine, context.socket(zmq.PAIR) as its:
        mine.linger = its.linger = 0
        mine.bind("inproc://engine")
        its.connect("inproc://engine")
        loop = Loop(engine(), None, its, os.getppid())
        mine.send(encode(SubmitAll([Submit(1, pack_tokens(range(200)), Sampling(max_tokens=4))])))
        mine.send(encode(Stop()))
        loop.run()
        assert loop.engine.busy and loop.engine.steps == 0


def test_more_host_memory_than_is_free_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_too_much(10**6)
    assert caplog.text == ""
    warn_of_too_much(10**18)
    assert "--host-kv-gb 1e+09 is more than the " in caplog.text and "give less" in caplog.text


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count it")
def test_time_without_a_processor_is_counted() -> None:
    cpus, before_s = os.sched_getaffinity(0), cpu_wait_s()
    try:
        os.sched_setaffinity(0, {min(cpus)})
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:  # it has the same one
            end_s = time.monotonic() + 10.0
            while cpu_wait_s() - before_s < 0.05:
                assert time.monotonic() < end_s
            busy.kill()
    finally:
        os.sched_setaffinity(0, cpus)
