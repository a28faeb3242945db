import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.members.health import MAX_REFUSALS, SLOWEST, Health, HealthConfig
from router.placement.cost import Candidate

Step = tuple[str, float]
WHAT = (
    *("success", "fault", "refused", "asked", "well", "ill", "silent"),
    *("excused", "refusal", "heard", "rests", "drain", "undrain", "tick"),
)
STEPS = st.lists(st.tuples(st.sampled_from(WHAT), st.floats(0, 3)), max_size=60)
CONFIGS = st.builds(
    HealthConfig, slow_start_s=st.sampled_from([0.0, 10.0]), probe_interval_s=st.sampled_from([0.0, 5.0])
)


def do(health: Health, what: str, now_s: float) -> None:
    match what:
        case "success":
            health.success(now_s)
        case "fault" | "refused" | "silent":
            health.fault(what, now_s, refused=what == "refused", silent=what == "silent")
        case "refusal":
            health.refusal(now_s)
        case "excused":
            health.excuse(1.0, now_s)
        case "asked":
            health.probing(now_s)
        case "well" | "ill":
            health.probed(what == "well", what, now_s)
        case "heard":
            health.heard(now_s)
        case "rests":
            health.rests("it drains")
        case "drain":
            health.drain()
        case "undrain":
            health.undrain()
        case "tick":
            health.tick(now_s)


def of_two(config: HealthConfig, kind: type[Health] = Health) -> Health:
    """The health of an address with two ranks."""
    health = kind(random.Random(0), 0.0, config)
    health.candidates += (Candidate("r0@dp0", 0), Candidate("r0@dp1", 1))
    health.publish()
    return health


def run(health: Health, steps: list[Step]) -> None:
    candidate, draining, now_s = health.candidates[0], False, 0.0
    for what, passed_s in steps:
        now_s += passed_s
        do(health, what, now_s)
        draining = what == "drain" or (draining and what != "undrain")
        assert candidate.unavailable is not None or not draining
        assert not (candidate.may_try_anyway and (draining or health.resting is not None))
        assert candidate.unavailable is not None or health.breaker != "open"
        other = health.candidates[1]
        assert (other.unavailable, other.slowness) == (candidate.unavailable, candidate.slowness)
        assert 1 <= candidate.slowness <= SLOWEST * 2**MAX_REFUSALS


@given(CONFIGS, STEPS)
def test_never_available_while_draining_or_open(config: HealthConfig, steps: list[Step]) -> None:
    run(of_two(config), steps)


@given(CONFIGS, STEPS)
def test_every_replica_that_is_well_again_becomes_available_and_fast(config: HealthConfig, steps: list[Step]) -> None:
    health = of_two(config)
    run(health, steps)
    health.undrain()
    now_s = 1000.0
    for _ in range(3):
        health.tick(now_s)
        health.heard(now_s)
        health.probing(now_s)
        health.probed(True, "", now_s)
        health.success(now_s)
        now_s += 40
    health.heard(now_s)
    health.tick(now_s)
    assert health.candidates[0].unavailable is None and health.candidates[0].slowness == 1.0


class Forgetful(Health):
    def drain(self) -> None:
        pass


def test_the_property_fails_for_one_that_forgets_to_drain() -> None:
    health = of_two(HealthConfig(), Forgetful)
    with pytest.raises(AssertionError):
        run(health, [("well", 0.0), ("drain", 0.0)])
