"""Engines of several ranks; those that a test only asks are shared."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

from replica.engine.engine import Engine
from replica.lora.adapter import Adapters
from tests.processes import children, of_process
from tests.replica.models import native, saved

Started: TypeAlias = Callable[..., Engine]


@contextmanager
def closing_engine(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        if engine.mover is not None:
            engine.mover.close()
        engine.runner.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Started]:
    """Engines by model, number of ranks and changes of the configuration; each is started when it is first wanted."""
    with ExitStack() as stack:

        @cache
        def started(name: str, ranks: int, **changes: object) -> Engine:
            engine = native(saved(name, folder), tensor_parallel_size=ranks, **changes)
            return stack.enter_context(closing_engine(engine))

        yield started


def reading_other_files(monkeypatch: pytest.MonkeyPatch, other: Path) -> None:
    """In this process, which has the first rank, adapters are of another folder."""
    read = Adapters.read
    monkeypatch.setattr(Adapters, "read", lambda adapters, name, _: read(adapters, name, other))


def followers_of(pid: int) -> list[int]:
    """The further ranks among a process's children."""
    return [child for child in children(pid) if b".follower\0" in of_process(child, "cmdline")]
