"""One replica for all tests; those that end, fill or break one start their own."""

from collections.abc import Iterator

import pytest

from tests.replica.serving import Replica, replica


@pytest.fixture(scope="session")
def served() -> Iterator[Replica]:
    with replica() as running:
        yield running
