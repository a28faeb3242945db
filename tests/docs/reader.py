"""`python -m tests.docs.reader PAGE`: run a page's commands in their order, as a reader would, in an empty folder.

It is meant to run in a network namespace of its own, so that the ports and addresses of the pages are free.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory
from threading import Thread

from tests.docs.pages import PRINTS_THE_SAME, ROOT, Command, commands_of
from tests.docs.walks import EVERYWHERE, WALKS, Ends, How, NotHere, Serves, Walk
from tests.processes import is_alive

WITHIN_S = 90.0
END_S = 30.0
DONE = "the-command-has-ended"
VARIES = (
    (re.compile(r'"content":"[^"]*"'), '"content":"..."'),
    (re.compile(r"\b[0-9a-f]{8,}\b|\d[\d.,]*"), "N"),
    (re.compile(r"\b(?:ms|min|us|s|h|k|M)\b|(?<=N)(?:ms|min|us|s|h|k|M)\b"), ""),
    (re.compile(r"\s+"), " "),
)


class Shell:
    """One bash for a whole page, whose variables and environment last as they do for a reader."""

    def __init__(self, folder: Path, temporary: str) -> None:
        self.folder = folder
        self._lines: Queue[str] = Queue()
        self._bash = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=environment(folder, temporary),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self._serving: dict[str, tuple[int, Path]] = {}
        self.run("set -m")  # what runs on has a process group of its own

    def _read(self) -> None:
        assert self._bash.stdout is not None
        for line in self._bash.stdout:
            self._lines.put(line)

    def run(self, command: str, within_s: float = WITHIN_S) -> tuple[int, str]:
        """Its exit status and output."""
        self._write(f"{{ {command}\n}} < /dev/null\nstatus=$?; echo; echo {DONE} $status\n")
        output, deadline = "", time.monotonic() + within_s
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except Empty:
                raise AssertionError(f"does not end: {command}\n{output}") from None
            if line.startswith(DONE):
                return int(line.split()[1]), output
            output += line

    def serve(self, command: str, says: str) -> str:
        """Begin it, and wait until it says so."""
        log = self.folder / f".log-{len(list(self.folder.glob('.log-*')))}"
        _, output = self.run(f"{{ {command}\n}} > {log} 2>&1 &\necho pid $!")
        pid = int(output.split("pid ")[1].split()[0])
        self._serving[command] = (pid, log)
        deadline = time.monotonic() + WITHIN_S
        while not log.exists() or says not in log.read_text():
            assert is_alive(pid), f"exited: {command}\n{log.read_text()}"
            assert time.monotonic() < deadline, f"prints nothing: {command}\n{log.read_text()}"
            time.sleep(0.1)
        time.sleep(0.0 if says else 2.0)
        return log.read_text()

    def end(self, begins: str) -> None:
        """End what runs on, and begins so."""
        for command in [each for each in self._serving if each.startswith(begins)]:
            self._stop(command)

    def _stop(self, command: str) -> None:
        pid, log = self._serving.pop(command)
        deadline, number = time.monotonic() + END_S, signal.SIGTERM
        while is_alive(pid):
            os.killpg(pid, number)
            until = time.monotonic() + END_S
            while is_alive(pid) and time.monotonic() < until:
                time.sleep(0.05)
            number = signal.SIGKILL
            assert time.monotonic() < deadline + 2 * END_S, log.read_text()

    def close(self) -> None:
        for command in list(self._serving):
            self._stop(command)
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        self._bash.wait(END_S)
        self._reader.join(END_S)
        assert self._bash.stdout is not None
        self._bash.stdout.close()

    def _write(self, text: str) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write(text)
        self._bash.stdin.flush()


def environment(folder: Path, temporary: str) -> dict[str, str]:
    """With `warmroute` and `make` as they are where a reader has cloned and installed this."""
    programs = folder / ".programs"
    programs.mkdir()
    python = Path(sys.executable)
    venv = python.parents[1]
    (folder / ".venv").symlink_to(venv)
    for name, command in {
        "warmroute": f'"{python}" -m fleet',
        "python": f'"{python}"',
        "make": f'/usr/bin/make -s -C "{ROOT}" -o "{venv}/.installed" VENV="{venv}" INSTALLED= BIN="{programs}"',
    }.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WARMROUTE_", "RAY_"))}
    return kept | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": temporary,
        "XDG_RUNTIME_DIR": temporary,
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "TERM": "dumb",
    }


def walk(name: str, shell: Shell) -> None:
    page = WALKS[name]
    scenes = {scene.before: scene.commands for scene in page.scenes}
    for line in scenes.pop("", ()):
        step(line, page, shell)
    for command in commands_of((ROOT / name).read_text()):
        for before in [each for each in scenes if command.line.startswith(each)]:
            for line in scenes.pop(before):
                step(line, page, shell)
        if not PRINTS_THE_SAME.fullmatch(command.line):
            if isinstance(how_to(command.line, page), Serves):  # the reader has ended the one before
                shell.end(" ".join(command.line.split()[:2]))
            output = step(command.line, page, shell)
            if output is not None and command.line.startswith(page.shows or ("\0",)):
                compare(command, output)


def how_to(line: str, page: Walk) -> How:
    known = {**EVERYWHERE, **page.how}
    names = [name for name in known if line.startswith(name)]
    return known[max(names, key=len)] if names else Ends((0,))


def step(line: str, page: Walk, shell: Shell) -> str | None:
    """Run one command, and return its output unless it cannot run here."""
    began_s = time.monotonic()
    if line.startswith("end "):
        shell.end(line.removeprefix("end "))
        return None
    match how_to(line, page):
        case NotHere(because):
            print(f"not here   {line.splitlines()[0]}   # {because}", flush=True)
            return None
        case Serves(says):
            output = shell.serve(line, says)
        case Ends(statuses):
            status, output = shell.run(line)
            assert status in statuses, f"status {status}: {line}\n{output}"
    print(f"{time.monotonic() - began_s:7.1f} s  {line.splitlines()[0]}", flush=True)
    return output


def compare(command: Command, output: str) -> None:
    """Check that the command prints every line on the page, except for values that vary."""
    printed = {masked(line) for line in output.splitlines()}
    missing = [line for line in command.shown.splitlines() if line.strip() and masked(line) not in printed]
    assert not missing, f"{command.line} does not print {missing}, but:\n{output}"


def masked(line: str) -> str:
    for pattern, instead in VARIES:
        line = pattern.sub(instead, line)
    return line.strip()


@contextmanager
def opened(folder: Path) -> Iterator[Shell]:
    with TemporaryDirectory(dir="/tmp", prefix="w-") as temporary:  # Ray's sockets want a short name
        shell = Shell(folder, temporary)
        try:
            yield shell
        finally:
            shell.close()


def main() -> None:
    for words in (("link", "set", "lo", "up"), ("address", "add", "10.0.0.1/8", "dev", "lo")):
        subprocess.run(["ip", *words], check=True)
    with opened(Path.cwd()) as shell:
        walk(sys.argv[1], shell)


if __name__ == "__main__":
    main()
