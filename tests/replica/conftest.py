"""Replicas for all tests; those that end, fill or break one start their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replica.natives import demo
from tests.replica.serving import KEY, SLOW, Replica, replica


@pytest.fixture(scope="session")
def served() -> Iterator[Replica]:
    with replica() as running:
        yield running


@pytest.fixture(scope="session")
def halves() -> Iterator[Replica]:
    """One that says beginnings and ends of two-byte characters: about a third of them fit together."""
    with replica(vocabulary=(0x80, 0xE0)) as running:
        yield running


@pytest.fixture(scope="session")
def with_a_key() -> Iterator[Replica]:
    with replica(SLOW, {"api_key": KEY}, max_num_seqs=1, max_waiting=1) as running:
        yield running


@pytest.fixture
def guarded(with_a_key: Replica) -> Iterator[Replica]:
    """One that is slow, wants a KEY, and has room for one request and for one that waits; it begins idle."""
    yield with_a_key
    with_a_key.wait_idle()


@pytest.fixture(scope="session")
def origin(demo_cache: Path) -> Iterator[Replica]:
    """A native replica of the demo model."""
    with demo(demo_cache) as running:
        yield running


@pytest.fixture(scope="session")
def successor(demo_cache: Path) -> Iterator[Replica]:
    """Another one, for what moves from one to the other."""
    with demo(demo_cache) as running:
        yield running
