"""An order of eviction that figures of plain models have."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def least_recently_used() -> Iterator[None]:
    """Let blocks that were used once age no faster than others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replica.cache.free_queue.FASTER", 1)
        yield
