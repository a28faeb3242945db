"""One line for every request."""

import json
import os
import resource
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from router.records.access_log import Line, encode, line_of
from router.records.line_file import LineFile

SCOPE = {"client": ("10.0.0.9", 4711), "method": "POST", "path": "/v1/chat/completions"}


def line(**more: object) -> Line:
    return line_of(SCOPE, status=200, duration_s=1.23456789, sent_bytes=7, request_id="r-1", **more)


def test_a_line_has_what_is_known_and_nothing_else(tmp_path: Path) -> None:
    log = LineFile(str(tmp_path / "log"), "access log")
    log.add(encode(line(model="m", retries=0)))
    log.add(encode(line(client_left=True, cached_tokens=0)))
    log.close()
    first, second = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert first.pop("ts") > 1e9
    assert first == {
        "client": "10.0.0.9", "method": "POST", "path": "/v1/chat/completions", "status": 200,
        "duration_s": 1.234568, "sent_bytes": 7, "request_id": "r-1", "model": "m",
    }  # fmt: skip
    assert second["client_left"] is True and second["cached_tokens"] == 0


def test_a_line_end_within_a_name_does_not_begin_a_line(tmp_path: Path) -> None:
    log = LineFile(str(tmp_path / "log"), "access log")
    log.add(encode(line(model='a\n{"status":200}\x1b[2J')))
    log.close()
    [only] = (tmp_path / "log").read_text().splitlines()
    assert json.loads(only)["model"].startswith("a\n") and "\x1b" not in only


def test_stdout_stays_open(capfd: pytest.CaptureFixture[str]) -> None:
    log = LineFile("-", "access log")
    log.add(encode(line()))
    log.close()
    log.add(encode(line()))
    assert capfd.readouterr().out.count('"status":200') == 2


def test_a_client_without_an_address_has_none() -> None:
    scope = {**SCOPE, "client": None}
    assert line_of(scope, status=1, duration_s=0, sent_bytes=0, request_id="").client is None


def test_an_unwritable_log_does_no_harm_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    read, write = os.pipe()
    os.set_blocking(write, False)
    log = LineFile(f"/dev/fd/{write}", "access log")
    os.set_blocking(log._fd, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    for _ in range(3):
        log.add(encode(line()))
    assert log.lost_lines == 3
    os.read(read, 1 << 20)
    log.add(encode(line()))
    log.add(encode(line()))
    assert os.read(read, 1 << 20).count(b'"status":200') == 2
    for end in (read, write):
        os.close(end)
    log.add(encode(line()))  # nobody reads it any more
    log.close()
    assert log.lost_lines == 4
    said = [record.getMessage() for record in caplog.records]
    assert ["Cannot write" in text for text in said] == [True, False, True]
    assert said[1].endswith("lines lost: 3")


def test_a_line_that_was_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    log = LineFile(str(tmp_path / "log"), "access log")
    size = len(msgspec.json.encode(line())) + 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, before[1]))  # Python itself ignores SIGXFSZ
    try:
        log.add(encode(line()))
        log.add(encode(line()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.add(encode(line()))
    log.close()
    whole, _, after = (tmp_path / "log").read_text().splitlines()
    assert json.loads(whole)["status"] == json.loads(after)["status"] == 200
    assert log.lost_lines == 1
