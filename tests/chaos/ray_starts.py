"""Starts of Ray's nodes, on machines of a test."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.nodes import Node
from tests.events.processes import wait_until

# A start imports Python's libraries in five processes, which is some seconds of computing, and a test starts several
# nodes. Where others compute, too, that takes minutes.
WITHIN_S = 180.0
STARTED = "Ray runtime started"
# Ray does so when a node has not registered in half a minute, however busy the machine is; no setting changes that.
GAVE_UP = "The current node timed out during startup"


class RayStart:
    """`ray start --block` on a machine that has nothing else to run yet."""

    def __init__(self, node: Node, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self._node, self._command, self._log, self._env = node, command, log, env
        self._process = self._begun()

    def wait(self) -> None:
        """Wait until the node has started, and begin again where Ray gave up for its own clock; fail if it ends."""
        end_s = time.monotonic() + WITHIN_S
        try:
            while not self._has_started(end_s):
                self._node.kill_all()
                self._process = self._begun()
        except AssertionError as failure:
            failure.add_note(f"It said:\n{self._said}")
            raise

    def _has_started(self, end_s: float) -> bool:
        """Wait; False: Ray gave up."""
        left_s = end_s - time.monotonic()
        wait_until(lambda: self._has_ended or STARTED in self._said, "Ray has started", left_s)
        if self._has_ended and GAVE_UP in self._said:
            return False
        assert not self._has_ended, f"Ray has ended with status {self._process.returncode}"
        return True

    def _begun(self) -> "subprocess.Popen[Any]":
        self._log.unlink(missing_ok=True)
        return self._node.start(self._command, self._log, env=self._env)

    @property
    def _has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def _said(self) -> str:
        return self._log.read_text(errors="replace")
