"""Every client whose environment is there."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from qualification.clients.rows import CLIENTS
from qualification.clients.running import LANGUAGES, VARIABLE, Servings, run

FOLDER = os.environ.get(VARIABLE)
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(FOLDER is None, reason=f"{VARIABLE} is not set; `python -m qualification.clients DIR` makes it"),
]


@pytest.fixture(scope="module")
def servings() -> Iterator[Servings]:
    with ExitStack() as stack:
        yield Servings(Path(FOLDER or ""), stack)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_passes_its_checks(name: str, servings: Servings) -> None:
    folder = Path(FOLDER or "")
    if not LANGUAGES[CLIENTS[name].language].is_installed(folder, name):
        pytest.skip(f"{folder} has no environment of {name}; run `python -m qualification.clients {folder} {name}`")
    assert run(name, folder, servings.of(name)).failed == []
