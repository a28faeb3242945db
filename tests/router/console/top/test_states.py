"""One word for how a replica is doing."""

from typing import Any

import pytest

from router.console.top.tables import LAGGING_BATCHES, reason_of, state_of
from router.responses import FeedState
from tests.router.console.top.samples import a_replica


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({}, "exact", ""),
        ({"state": "partial", "inexact": "4 batches are lost"}, "partial", "4 batches are lost"),
        ({"state": "syncing", "inexact": "being read"}, "lagging", "being read"),
        ({"events": FeedState(lag_batches=LAGGING_BATCHES)}, "lagging", ""),
        ({"events": FeedState(lag_batches=LAGGING_BATCHES - 1)}, "exact", ""),
        ({"state": "approximate", "events": None}, "approximate", ""),
        ({"available": False, "why": "silent for 2.0 s"}, "down", "silent for 2.0 s"),
        ({"available": False, "why": "draining"}, "draining", "draining"),
        ({"available": False, "why": "it drains"}, "draining", "it drains"),
        ({"idle": "no prompt came for it"}, "exact", "idle: no prompt came for it"),
        ({"available": False, "why": "draining", "idle": "draining"}, "draining", "draining"),
        ({"state": "of a newer router"}, "approximate", ""),
    ],
)
def test_the_worst_counts(changes: dict[str, Any], state: str, reason: str) -> None:
    replica = a_replica(**changes)
    assert (state_of(replica), reason_of(replica)) == (state, reason)
