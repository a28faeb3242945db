"""One word for how a replica is doing."""

from typing import Any

import pytest

from router.console.top.tables import reason_of, state_of
from tests.router.console.top.samples import a_replica


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({}, "exact", ""),
        ({"standing": "lagging", "inexact": "4 batches are lost"}, "lagging", "4 batches are lost"),
        ({"available": False, "why": "silent for 2.0 s", "standing": "down"}, "down", "silent for 2.0 s"),
        ({"available": False, "why": "draining", "standing": "draining", "idle": "x"}, "draining", "draining"),
        ({"idle": "no prompt came for it"}, "exact", "idle: no prompt came for it"),
        ({"standing": "of a newer router"}, "approximate", ""),
    ],
)
def test_its_standing_and_the_reason_are_told(changes: dict[str, Any], state: str, reason: str) -> None:
    replica = a_replica(**changes)
    assert (state_of(replica), reason_of(replica)) == (state, reason)
