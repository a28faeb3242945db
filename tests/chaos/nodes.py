"""Machines for chaos tests: network namespaces on one box, each with an address and a link that can be cut.

On loopback there is no partition: a closed port answers with a reset, a cut link with silence. Namespaces joined by a
bridge have that silence; they need root and iproute2, and no second machine.
"""

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import of_process

_NETWORKS = itertools.count()
_BRIDGE = "br0"
_EXIT_WAIT_S = 5.0


def no_nodes() -> str | None:
    """Why this process cannot make namespaces."""
    if os.geteuid() != 0:
        return "network namespaces are for root to make"
    if shutil.which("ip") is None:
        return "needs ip of iproute2"
    probe = f"wr{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return None


_CLONE_NEWNET = 0x4000_0000


def _enter(namespace: int) -> None:
    """Move this thread, and the threads that it starts later, into the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the namespace")


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Node:
    """One machine of a network: a namespace, its address, and its processes."""

    namespace: str
    address: str
    switch: str
    port: str
    children: list[subprocess.Popen[Any]] = field(default_factory=list)

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> "subprocess.Popen[Any]":
        """Start a process in a session of its own: a terminal's signals are for the tests."""
        words = ["ip", "netns", "exec", self.namespace, *command]
        with log.open("ab") as out:
            child: subprocess.Popen[Any] = subprocess.Popen(
                words,
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.children.append(child)
        return child

    def run(
        self, command: Sequence[str], given: bytes = b"", env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> "subprocess.CompletedProcess[bytes]":
        words = ["ip", "netns", "exec", self.namespace, *command]
        env = None if env is None else dict(env)
        return subprocess.run(words, input=given, env=env, capture_output=True, timeout=timeout_s, check=False)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Enter the node's network namespace with this thread: its connections and child processes are the node's."""
        with open("/proc/thread-self/ns/net") as before, open(f"/var/run/netns/{self.namespace}") as here:
            _enter(here.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def cut(self) -> None:
        """Packets vanish in both directions; the machine's own sockets and address stay up."""
        ip("-n", self.switch, "link", "set", self.port, "down")

    def restore(self) -> None:
        """Let packets through again."""
        ip("-n", self.switch, "link", "set", self.port, "up")

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        self.cut()
        try:
            yield
        finally:
            self.restore()

    def processes(self) -> dict[int, str]:
        """Pids and command lines."""
        return {
            int(word): of_process(int(word), "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
            for word in ip("netns", "pids", self.namespace).split()
        }

    def kill_all(self) -> None:
        """Take its power away, and wait until nothing lives there."""
        deadline = time.monotonic() + _EXIT_WAIT_S
        while pids := ip("netns", "pids", self.namespace).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            self._reap()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.namespace} still holds {self.processes()}")
            time.sleep(0.02)
        for child in self.children:
            child.wait(_EXIT_WAIT_S)

    def _reap(self) -> None:
        """A zombie still counts as living in the namespace."""
        for child in self.children:
            child.poll()


@contextmanager
def network(size: int, *, subnet: str = "10.77.0") -> Iterator[list[Node]]:
    """Machines that see each other and nothing else; all of it is gone afterwards, also when the test fails.

    Names carry this process's id, so that tests side by side do not meet. The subnet may be the same in all of them:
    the bridge, too, is in a namespace of its own.
    """
    _sweep()
    name = f"wr{os.getpid()}-{next(_NETWORKS)}"
    switch = f"{name}-sw"
    made: list[Node] = []
    try:
        _add_switch(switch)
        for number in range(1, size + 1):
            node = Node(f"{name}-{number}", f"{subnet}.{number}", switch, f"port{number}")
            made.append(node)
            _add_node(node)
        yield made
    finally:
        _remove(switch, made)


def _sweep() -> None:
    """Remove namespaces of killed tests: names whose process no longer exists."""
    for name in _present():
        owner = re.fullmatch(r"wr(\d+)-.+", name)
        if owner is not None and not Path("/proc", owner[1]).exists():
            Node(name, "", "", "").kill_all()
            ip("netns", "delete", name)


def _present() -> list[str]:
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line]


def _add_switch(switch: str) -> None:
    """A namespace that holds only the bridge: the box's own interfaces and firewall stay untouched."""
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", _BRIDGE, "type", "bridge")
    ip("-n", switch, "link", "set", _BRIDGE, "up")


def _add_node(node: Node) -> None:
    """A namespace with loopback and one cable to the switch."""
    ip("netns", "add", node.namespace)
    ip("-n", node.namespace, "link", "set", "lo", "up")
    cable = ["link", "add", "eth0", "netns", node.namespace, "type", "veth"]
    ip(*cable, "peer", "name", node.port, "netns", node.switch)
    ip("-n", node.switch, "link", "set", node.port, "master", _BRIDGE, "up")
    ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
    ip("-n", node.namespace, "link", "set", "eth0", "up")


def _remove(switch: str, nodes: Sequence[Node]) -> None:
    """Remove a network, however incomplete; raises the first failure at the end."""
    present = _present()
    failures: list[Exception] = []
    for node in (node for node in nodes if node.namespace in present):
        try:
            node.kill_all()
        except (RuntimeError, OSError) as failure:
            failures.append(failure)
        ip("netns", "delete", node.namespace)
    if switch in present:
        ip("netns", "delete", switch)
    if failures:
        raise failures[0]
