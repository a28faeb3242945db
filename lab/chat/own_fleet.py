"""A fleet for as long as a demonstration lasts: `warmroute up` as a child of this process."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.status import Status

from api.process.lifeline import die_with_parent, module
from fleet.commands.addresses.local_fleets import LocalFleet, recorded_fleets
from fleet.host.child import LAST_LINES, TAIL_BYTES

LOOK_S = 0.05
READY = "Ctrl-C ends everything."  # what `warmroute up` says last, once all can be asked


@contextmanager
def own_fleet() -> Iterator[LocalFleet]:
    """Run two replicas and a router; a click error, with what `warmroute up` has said, if they cannot start."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())  # for logs: `up` would keep its own after a kill
        output = stack.enter_context(open(Path(folder, "up.log"), "w+b"))
        process = stack.enter_context(_running(folder, output))
        with Status("Starting two replicas and a router", console=Console(stderr=True)):
            while READY not in _said(output):
                if process.poll() is not None:
                    said = "\n".join(_said(output).splitlines()[-LAST_LINES:])
                    raise click.ClickException(f"`warmroute up` cannot start a fleet to show:\n{said}")
                time.sleep(LOOK_S)
        [fleet] = [fleet for fleet in recorded_fleets() if fleet.pid == process.pid]
        yield fleet


@contextmanager
def _running(folder: str, output: IO[bytes]) -> Iterator["subprocess.Popen[bytes]"]:
    parent = os.getpid()
    process = subprocess.Popen(
        module("fleet", "up", "--no-ray", "--port", "0", "--log-dir", folder),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in a terminal is for this process, which ends the fleet in order
        preexec_fn=lambda: die_with_parent(parent),
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait()
        except KeyboardInterrupt:  # a second one does not wait
            process.kill()
            process.wait()


def _said(output: IO[bytes]) -> str:
    written_bytes = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), TAIL_BYTES, max(0, written_bytes - TAIL_BYTES)).decode(errors="replace")
