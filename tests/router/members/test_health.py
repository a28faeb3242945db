import random

import pytest

from router.members.health import MAX_REFUSALS, SLOWEST, Health, HealthConfig
from router.placement.cost import Candidate

NO_JITTER = HealthConfig(jitter=0.0)


def replica(config: HealthConfig = NO_JITTER, *, reached: bool = True) -> tuple[Candidate, Health]:
    candidate = Candidate("r0", 0)
    health = Health(random.Random(0), 0.0, config)
    health.candidates.append(candidate)
    health.publish()
    if reached:
        health.probed(True, "", 0.0)
    return candidate, health


def why(candidate: Candidate) -> str | None:
    return candidate.unavailable


def breaker(health: Health) -> str:
    return health.breaker


def test_a_replica_takes_nothing_until_it_is_reached() -> None:
    candidate, health = replica(reached=False)
    assert why(candidate) == "not reached yet" and health.probe_due(0.0)
    health.probed(False, "connection refused", 0.1)
    assert why(candidate) == "not reached yet: health check: connection refused"
    assert not health.probe_due(0.2) and health.probe_due(0.7)
    health.probed(True, "", 0.8)
    assert why(candidate) is None and candidate.slowness == 1.0


def test_a_replica_that_is_only_starting_is_probed_eagerly_however_often_it_refuses() -> None:
    candidate, health = replica(reached=False)
    for number in range(20):
        health.probed(False, "connection refused", float(number))
    assert breaker(health) == "closed" and health.probe_due(19.6)
    assert not candidate.may_try_anyway


def test_without_active_checks_a_replica_is_available_at_once() -> None:
    candidate, health = replica(HealthConfig(probe_interval_s=0.0), reached=False)
    assert why(candidate) is None and not health.probe_due(100.0)


def test_three_faults_in_a_row_open_the_breaker_and_the_reason_is_quoted() -> None:
    candidate, health = replica()
    health.fault("no first byte within 30 s", 1.0)
    health.fault("status 500", 1.1)
    assert why(candidate) is None
    health.fault("status 500", 1.2)
    assert why(candidate) == "status 500 (faults in a row: 3)" and candidate.may_try_anyway


def test_a_success_between_them_breaks_the_row() -> None:
    candidate, health = replica()
    for number in range(10):
        health.fault("status 500", float(number))
        health.fault("status 500", float(number))
        health.success(float(number))
    assert why(candidate) is None and breaker(health) == "closed"


def test_one_refused_connection_is_enough() -> None:
    candidate, health = replica()
    health.fault("connection refused", 1.0, refused=True)
    assert why(candidate) == "connection refused (faults in a row: 1)"


def test_after_the_wait_one_probe_decides() -> None:
    candidate, health = replica()
    health.fault("connection refused", 1.0, refused=True)
    health.tick(1.4)
    assert breaker(health) == "open" and not health.probe_due(1.4)
    health.probed(True, "", 1.45)  # was on its way already
    assert breaker(health) == "open"
    health.tick(1.6)
    assert breaker(health) == "half-open" and health.probe_due(1.6)
    assert why(candidate) == "being tried again after: connection refused"
    health.probed(True, "", 1.7)
    assert why(candidate) is None and breaker(health) == "closed"


def test_without_active_checks_the_next_request_decides() -> None:
    candidate, health = replica(HealthConfig(probe_interval_s=0.0, jitter=0.0))
    health.fault("connection refused", 1.0, refused=True)
    health.tick(1.6)
    assert why(candidate) is None and candidate.slowness == SLOWEST
    health.fault("status 500", 1.7)  # one is enough now
    assert breaker(health) == "open"
    health.tick(2.8)
    health.success(2.9)
    assert breaker(health) == "closed"


def waits(health: Health, times: int) -> list[float]:
    """Seconds that the breaker stays open after each failed probe."""
    found, now_s = [], 1.0
    health.fault("connection refused", now_s, refused=True)
    for _ in range(times):
        opened_s = now_s
        while breaker(health) == "open":
            now_s += 0.01
            health.tick(now_s)
        found.append(round(now_s - opened_s, 1))
        health.probed(False, "connection refused", now_s)
    return found


def test_the_wait_doubles_up_to_a_bound() -> None:
    assert waits(replica()[1], 8) == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_jitter_makes_waits_differ() -> None:
    config = HealthConfig(jitter=0.5)
    found = set()
    for seed in range(5):
        health = Health(random.Random(seed), 0.0, config)
        health.probed(True, "", 0.0)
        found.add(tuple(waits(health, 6)))
    assert len(found) == 5


def test_a_flapping_replica_waits_longer_each_time_until_it_was_steady() -> None:
    _, health = replica()
    health.fault("connection refused", 1.0, refused=True)
    health.tick(1.6)
    health.probed(True, "", 1.6)
    health.fault("connection refused", 2.0, refused=True)
    health.tick(2.9)
    assert breaker(health) == "open"  # a whole second this time
    health.tick(3.1)
    health.probed(True, "", 3.1)
    health.tick(14.0)
    health.fault("connection refused", 20.0, refused=True)
    health.tick(20.6)
    assert breaker(health) == "half-open"


def test_many_requests_that_fail_at_once_open_it_once() -> None:
    _, health = replica()
    for _ in range(64):
        health.fault("connection reset", 1.0)
    health.tick(1.6)
    assert breaker(health) == "half-open"


def test_a_replica_that_comes_back_is_dearer_at_first() -> None:
    candidate, health = replica()
    health.fault("connection refused", 1.0, refused=True)
    health.tick(2.0)
    health.probed(True, "", 2.0)
    seen = [candidate.slowness]
    for now_s in (4.5, 7.0, 9.5, 12.0):
        health.tick(now_s)
        seen.append(candidate.slowness)
    assert seen[0] == SLOWEST and seen[-1] == 1.0 and seen == sorted(seen, reverse=True)


def test_slow_start_can_be_off() -> None:
    candidate, health = replica(HealthConfig(slow_start_s=0.0))
    health.fault("connection refused", 1.0, refused=True)
    health.tick(2.0)
    health.probed(True, "", 2.0)
    assert candidate.slowness == 1.0 and why(candidate) is None


def test_silence_counts_once_it_was_heard_and_ends_at_once() -> None:
    candidate, health = replica()
    health.tick(50.0)
    assert why(candidate) is None  # never heard: it may have no status
    health.heard(50.0)
    health.tick(51.0)
    assert why(candidate) is None
    health.tick(51.2)
    assert why(candidate) == "silent for 1.2 s" and health.silent and not candidate.may_try_anyway
    health.heard(51.3)
    assert why(candidate) is None and candidate.slowness == 1.0


def test_an_engine_whose_steps_take_long_may_be_silent_for_longer() -> None:
    _, health = replica()
    now_s = 0.0
    for pause_s in (0.25, 0.25, 0.9, 0.25):
        now_s += pause_s
        health.heard(now_s)
    health.tick(now_s + 1.5)
    assert health.silent_s == 0
    health.tick(now_s + 1.9)
    assert health.silent_s > 0
    for _ in range(600):  # its steps are short again
        now_s += 0.25
        health.heard(now_s)
    health.tick(now_s + 1.1)
    assert health.silent_s > 0


def test_a_standstill_says_nothing_about_steps() -> None:
    _, health = replica()
    for now_s in (1.0, 1.2, 7.0, 7.2):  # it stood still for 5.8 s
        health.heard(now_s)
    health.tick(8.3)
    assert health.silent


def test_time_in_which_the_router_stood_still_is_no_silence() -> None:
    candidate, health = replica()
    health.heard(50.0)
    health.excuse(6.0, 56.1)
    health.tick(56.1)
    assert why(candidate) is None and health.heard_age_s(56.1) == pytest.approx(0.1)
    health.tick(57.2)
    assert why(candidate) == "silent for 1.2 s"
    health.excuse(100.0, 58.0)  # more than there was
    assert health.heard_age_s(58.0) == 0


def test_a_breaker_that_silence_opened_closes_with_the_first_heartbeat_and_the_replica_comes_back_at_once() -> None:
    candidate, health = replica()
    health.heard(0.0)
    for number in range(8):
        health.fault("no connection within 2 s", 2.0 + number, refused=True, silent=True)
        health.tick(2.9 + number)
        assert breaker(health) == "half-open", "a silent replica is probed every half second"
        assert not candidate.may_try_anyway
    health.heard(10.0)
    assert why(candidate) is None and candidate.slowness == 1.0


def test_a_heartbeat_is_no_proof_that_a_frozen_server_answers_again() -> None:
    candidate, health = replica()
    health.heard(1.0)
    health.fault("it did not answer /ready within 1 s", 1.1, refused=True, silent=True)
    health.heard(1.2)
    assert breaker(health) == "open"
    health.tick(1.8)
    health.probed(True, "", 1.9)
    assert why(candidate) is None and candidate.slowness == 1.0


def test_each_refusal_makes_a_replica_twice_as_dear_and_answers_and_time_make_it_cheaper() -> None:
    candidate, health = replica()
    for number in range(3):
        health.refusal(1.0)
        assert candidate.slowness == 2 ** (number + 1)
    health.success(1.0)
    health.tick(1.0)
    assert candidate.slowness == 4
    health.probed(True, "", 1.0)  # that it answers a health check says nothing of requests
    health.tick(2.0)
    assert candidate.slowness == 2
    health.tick(9.0)
    assert candidate.slowness == 1
    for _ in range(100):
        health.refusal(10.0)
    assert candidate.slowness == 2**MAX_REFUSALS


def test_a_sign_of_life_after_silence_ends_the_breakers_wait() -> None:
    _, health = replica()
    health.heard(0.0)
    for number in range(8):  # a long wait by now
        health.fault("connection refused", 2.0 + number * 100, refused=True)
        health.tick(100.0 + number * 100)
    health.fault("connection refused", 1000.0)
    assert breaker(health) == "open"
    health.heard(1000.1)
    assert breaker(health) == "half-open" and health.probe_due(1000.1)


def test_draining_goes_before_everything_and_is_not_overridden() -> None:
    candidate, health = replica()
    health.drain()
    assert why(candidate) == "draining" and not candidate.may_try_anyway
    health.fault("connection refused", 1.0, refused=True)
    health.success(1.1)
    assert why(candidate) == "draining"
    health.undrain()
    assert why(candidate) is None


def test_a_replica_that_says_it_drains_rests_until_a_probe_goes_well() -> None:
    candidate, health = replica()
    health.rests("it drains")
    health.success(1.0)  # the last of its answers
    assert why(candidate) == "it drains" and not candidate.may_try_anyway and breaker(health) == "closed"
    health.probing(5.0)
    assert health.probe_due(5.6)  # eagerly
    health.probed(True, "", 5.7)
    assert why(candidate) is None


def test_a_probe_that_was_under_way_does_not_end_a_rest() -> None:
    candidate, health = replica()
    health.probing(1.0)
    health.rests("it drains")  # says an answer that overtakes the probe's
    health.probed(True, "", 1.1)
    assert why(candidate) == "it drains"
    assert health.probe_due(1.7)  # eagerly
    health.probing(1.7)
    health.probed(True, "", 1.8)
    assert why(candidate) is None
