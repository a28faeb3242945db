"""A replica's log: reading it while it is written, and keeping it short."""

import subprocess
import sys
from pathlib import Path

import pytest

from fleet.host import child
from fleet.host.child import Log


def write(log: Log, text: str) -> None:
    """As a replica does it: by a descriptor of its own, from a process of its own."""
    subprocess.run([sys.executable, "-c", f"print({text!r}, flush=True)"], stdout=log.descriptor, check=True)


def test_a_log_that_is_too_long_starts_over_and_keeps_what_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "LONGEST_LOG_BYTES", 10)
    log = Log(tmp_path / "m-0.log")
    begin = log.size
    write(log, "one")
    log.shorten()
    assert log.tail(begin) == log.last(9) == "one\n"
    write(log, "two, which is longer")
    begin = log.size
    log.shorten()
    assert log.last(9) == ""
    assert Path(f"{log.path}.1").read_text() == "one\ntwo, which is longer\n"
    write(log, "three")
    assert log.path.read_text() == log.last(9) == "three\n"
    assert log.tail(begin) == "three\n", "the log was truncated since"
    log.close()


def test_a_log_without_its_folder_is_still_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "LONGEST_LOG_BYTES", 10)
    folder = tmp_path / "logs"
    folder.mkdir()
    log = Log(folder / "m-0.log")
    log.path.unlink()
    folder.rmdir()
    write(log, "what nobody will read")
    log.shorten()
    assert log.size == 0
    log.close()
