"""Recorder and router hear the same in another order: the log's order is enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.incident.replay import replay
from tests.lab.incident.scene import Scene

POLICIES = ("cost", "random", "prefix")


@given(
    seed=st.integers(0, 10**6),
    apart_ms=st.integers(0, 500) | st.just(0),
    policy=st.sampled_from(POLICIES),
)
def test_whatever_order_the_recorder_heard_it_in_what_is_cached_is_what_the_router_knew(
    tmp_path_factory: pytest.TempPathFactory, seed: int, apart_ms: int, policy: str
) -> None:
    scene = Scene(tmp_path_factory.mktemp("scene"), seed, apart_s=apart_ms / 1000, policy=policy)
    scene.run(60)
    told = replay(scene.recording, scene.log)
    assert told.compared == 60 and not told.uncovered
    # Of a status between two decisions nobody knows whether it came before or after what else came then.
    assert not told.other_matches and set(told.kinds) <= {"load"}, told
    assert apart_ms or (told.is_same and not told.other_load), told
