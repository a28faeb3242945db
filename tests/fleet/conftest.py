"""A machine without fleets, and a controller that answers by a script."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.commands import change, down, logs
from tests.fleet.scripted import Script, calm, machine_without_fleets, serving


@pytest.fixture
def noted_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where fleets are noted; commands look often."""
    for command in (change, down, logs):
        monkeypatch.setattr(command, "LOOK_S", 0.005)
    return machine_without_fleets(tmp_path, monkeypatch)


@pytest.fixture
def script() -> Iterator[Script]:
    with serving(Script(calm())) as scripted:
        yield scripted
