"""`python -m qualification`: what it runs, what it leaves out, and what its status and its dates say."""

import datetime
import sys
from pathlib import Path

import pytest

from qualification.__main__ import PARTS, ROOT, Part, main

GOOD = Part("good", [(sys.executable, "-c", "")])
BAD = Part("bad", [(sys.executable, "-c", "raise SystemExit(3)")])
AWAY = Part("away", BAD.commands, lambda: "it is not here")


def rows(said: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| ")][1:]


def test_a_part_that_fails_is_the_status_and_keeps_its_old_date(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    passed = tmp_path / "passed.json"
    passed.write_text('{"bad": "2026-01-02"}')
    assert main([], {"good": GOOD, "bad": BAD, "away": AWAY}, passed) == 1
    said = capfd.readouterr().out
    assert "left out: it is not here" in said
    assert [(name, result, on) for name, result, _, on in rows(said)[1:]] == [
        ("good", "passed", datetime.date.today().isoformat()),
        ("bad", "FAILED", "2026-01-02"),
        ("away", "left out", "never"),
    ]
    assert f'"good": "{datetime.date.today()}"' in passed.read_text()


def test_what_is_not_here_fails_only_if_it_is_named(tmp_path: Path) -> None:
    parts = {"good": GOOD, "away": AWAY}
    assert main([], parts, tmp_path / "passed.json") == 0
    assert main(["away"], parts, tmp_path / "passed.json") == 1


def test_a_name_that_is_no_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["engine"])
    assert "'engine' is no part; the parts are engines, " in capsys.readouterr().err


def test_every_path_of_a_part_exists() -> None:
    words = [word for part in PARTS.values() for command in part.commands for word in command]
    paths = [word for word in words if word.startswith(("tests/", "qualification/"))]
    assert len(paths) > 10 and [path for path in paths if not (ROOT / path).exists()] == []
