"""The simulated fleet with policies, events and bounds."""

from functools import cache

import pytest
from msgspec.structs import replace

from events.messages import BlockStored
from lab.simulation.comparison import compared, ideal, outcome_of, pooled
from lab.simulation.fleet import simulated
from lab.simulation.job import Job, jobs_of
from lab.simulation.router import SimulatedRouter
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, TraceRequest, at_rate, coarsened
from router.placement.effects import PATIENCE
from tests.lab.traffic import agents, conversations, unshared

SETTINGS = Settings(replicas=4, capacity_tokens=300_000)
RATE = SETTINGS.prefill_tokens_per_s
CHATS = at_rate(conversations(300), 0.9 * 4 * RATE)
AGENTS = at_rate(coarsened(agents(400), 4), 3.0 * 4 * RATE)


def hits(jobs: list[Job]) -> float:
    return outcome_of(jobs, SETTINGS.replicas, RATE).hit_rate


def mean_ttft_s(jobs: list[Job]) -> float:
    return outcome_of(jobs, SETTINGS.replicas, RATE).ttft_mean_s


@cache
def chats(policy: str, settings: Settings = SETTINGS) -> list[Job]:
    """The conversations under this policy. Several tests look at each run; none changes it."""
    return simulated(CHATS, settings, policy, 0)


def one_prompt(at_s: float, tokens: int = 1600, number: int = 0, output_tokens: int = 40) -> TraceRequest:
    blocks = -(-tokens // 16)
    return TraceRequest(at_s, tokens, output_tokens, tuple(range(number * 10_000, number * 10_000 + blocks)))


def alone(requests: list[TraceRequest], settings: Settings = SETTINGS, policy: str = "cost") -> list[Job]:
    return simulated(Trace("t", 16, requests), settings, policy, seed=0)


@pytest.mark.parametrize("trace", [CHATS, AGENTS], ids=lambda trace: trace.name)
def test_no_policy_hits_more_than_an_endless_cache_and_prefixes_make_the_difference(trace: Trace) -> None:
    best = hits(ideal(trace, SETTINGS))
    shares = {policy: hits(simulated(trace, SETTINGS, policy, 0)) for policy in ("round-robin", "prefix", "cost")}
    assert max(shares.values()) <= best
    assert shares["cost"] > shares["round-robin"] + 0.15


def test_the_pool_of_all_is_a_bound_that_the_default_policy_comes_near() -> None:
    bound = pooled(CHATS, SETTINGS)
    own = chats("cost")
    assert hits(bound) - 0.08 < hits(own) < hits(bound) + 0.01
    assert mean_ttft_s(own) < mean_ttft_s(chats("least-loaded")) / 2


def test_traffic_that_shares_nothing_is_placed_as_well_as_by_load_alone() -> None:
    trace = at_rate(unshared(400), 0.8 * 4 * RATE)
    own, plain = (mean_ttft_s(simulated(trace, SETTINGS, policy, 0)) for policy in ("cost", "least-loaded"))
    assert own <= plain


def test_the_order_by_what_is_computed_lowers_the_mean_and_is_the_policys() -> None:
    """The same choices of replicas, computed in order of arrival, for comparison."""
    long, short = [one_prompt(0.0, 16_000, 1), one_prompt(0.1, 16_000, 2)], one_prompt(0.2, 1600, 3)
    single = replace(SETTINGS, replicas=1)
    by_cost, by_arrival = (alone([*long, short], single, policy) for policy in ("cost", "round-robin"))
    assert [job.number for job in sorted(by_cost, key=lambda job: job.first_s)] == [0, 2, 1]
    assert [job.number for job in sorted(by_arrival, key=lambda job: job.first_s)] == [0, 1, 2]
    assert by_cost[1].rank == pytest.approx(0.1 + PATIENCE * 16_000 / RATE)


def test_a_router_that_hears_nothing_goes_by_what_it_did() -> None:
    deaf = hits(chats("cost", replace(SETTINGS, events=False)))
    assert hits(chats("round-robin")) + 0.1 < deaf


def test_a_request_that_can_never_run_is_refused_with_what_it_needs() -> None:
    with pytest.raises(ValueError, match="give it 1,600 tokens or more"):
        alone([one_prompt(0.0)], Settings(capacity_tokens=1599))


def test_runs_with_one_seed_are_the_same_and_rows_say_which_are_bounds() -> None:
    few = Trace(CHATS.name, CHATS.block_tokens, CHATS.requests[:100])
    rows, again = (compared(few, SETTINGS, ["cost", "random"], seeds=2, jitter_s=0.3) for _ in range(2))
    assert rows == again
    assert [(row.name, row.is_bound, len(row.runs)) for row in rows] == [
        ("cost", False, 2),
        ("random", False, 2),
        ("pooled", True, 2),
        ("ideal", True, 2),
    ]
    assert rows[1].runs[0] != rows[1].runs[1]


def test_requests_wait_for_room_as_they_do_in_the_router() -> None:
    one_at_a_time = replace(SETTINGS, replicas=1, replica_limit=1)
    first, second, third = alone([one_prompt(0.0, number=number) for number in range(3)], one_at_a_time)
    whole_s = 1600 / RATE + 40 / 40
    assert [first.first_s, second.first_s, third.first_s] == pytest.approx(
        [number * whole_s + 1600 / RATE for number in range(3)]
    )


@pytest.mark.parametrize("limits", [{"queue_timeout_s": 1.5}, {"queue_size": 1}])
def test_requests_that_wait_in_vain_are_refused_and_counted(limits: dict[str, float]) -> None:
    settings = replace(SETTINGS, replicas=1, replica_limit=1, **limits)
    jobs = alone([one_prompt(0.0, number=number) for number in range(3)], settings)
    assert [job.is_refused for job in jobs] == [False, False, True]
    assert outcome_of(jobs, 1, RATE).refused == 1


def test_a_session_stays_together_where_the_policy_wants_that() -> None:
    requests = [one_prompt(10.0 * number, number=number)._replace(session=f"s{number % 5}") for number in range(40)]
    by_session: dict[str | None, set[int]] = {}
    for job in alone(requests, policy="session"):
        by_session.setdefault(job.request.session, set()).add(job.replica)
    assert len(by_session) == 5
    assert all(len(replicas) == 1 for replicas in by_session.values())


def test_what_a_replica_has_in_a_lower_medium_counts() -> None:
    router = SimulatedRouter("cost", replace(SETTINGS, replicas=2, capacity_tokens=16_000), 16, seed=0)
    [job] = jobs_of(Trace("t", 16, [one_prompt(0.0)]))
    keys = job.prompt.keys(16)
    ids = list(range(len(keys) * 16))
    router.heard(1, [BlockStored([*keys], None, ids, 16, None, "CPU", None)])
    assert router.place(job, 0.0)
    assert job.replica == 1


CLOSED = replace(SETTINGS, closed_loop=True)


def turn(at_s: float, session: str | None, number: int = 0, output_tokens: int = 400) -> TraceRequest:
    return one_prompt(at_s, number=number, output_tokens=output_tokens)._replace(session=session)


def test_in_a_closed_loop_a_turn_comes_when_the_one_before_has_ended_and_its_gap_is_over() -> None:
    first, second, third = alone([turn(0.0, "a"), turn(13.0, "a"), turn(1000.0, "a")], CLOSED)
    assert second.request.at_s == pytest.approx(first.ended_s + 3.0), "in the trace, 10 s were the answer"
    assert third.request.at_s == pytest.approx(second.ended_s + 120.0), "a longer gap is cut"
    found = outcome_of([first, second, third], SETTINGS.replicas, RATE)
    assert found.session_mean_s == found.session_p99_s == third.ended_s


def test_in_a_closed_loop_a_session_goes_on_after_a_turn_that_was_refused() -> None:
    narrow = replace(CLOSED, replicas=1, replica_limit=1, queue_timeout_s=1.0)
    other, refused, last = alone([turn(0.0, None, 1), turn(0.1, "a"), turn(20.1, "a")], narrow)
    assert [job.is_refused for job in (other, refused, last)] == [False, True, False]
    assert last.request.at_s == pytest.approx(0.1 + 1.0 + 10.0)


def test_sessions_end_sooner_if_they_begin_only_while_the_caches_hold_their_contexts() -> None:
    """Sixty sessions of 16 turns come within eight minutes, and the caches hold about ten of them."""
    requests, number = [], 0
    for session in range(60):
        blocks: list[int] = []
        for at in range(16):
            blocks += range(number, number := number + (16 if at == 0 else 1))
            at_s, name = 8.0 * session + 25.0 * at, f"session {session}"
            requests.append(TraceRequest(at_s, 1024 * len(blocks), 200, tuple(blocks), name))
    trace = Trace("sessions", 1024, sorted(requests, key=lambda request: request.at_s))

    def figures(tokens: int, working_set: bool) -> tuple[float, float]:
        settings = replace(CLOSED, replicas=2, capacity_tokens=tokens, working_set=working_set)
        found = outcome_of(simulated(trace, settings, "cost", 0), 2, RATE)
        assert found.session_mean_s is not None and not found.refused
        return found.hit_rate, found.session_mean_s

    (few, late_s), (more, sooner_s) = figures(150_000, False), figures(150_000, True)
    assert more > 2 * few and sooner_s < 0.85 * late_s
    assert figures(2_000_000, False) == figures(2_000_000, True), "nothing is held where nothing is lost"


def test_where_caches_are_too_small_for_all_sessions_a_closed_loop_shows_what_users_wait_for() -> None:
    """An open loop gives a turn its time, so that only first tokens are late."""
    turns = [(at_s, number) for at_s in range(6) for number in range(12)]  # 360,000 tokens in all
    talks = [one_prompt(at_s, 30_000, number)._replace(session=str(number)) for at_s, number in turns]
    waited = []
    for tokens in (31_000, 150_000):
        found = outcome_of(alone(talks, replace(CLOSED, capacity_tokens=tokens)), SETTINGS.replicas, RATE)
        assert found.session_mean_s is not None
        waited.append(found.session_mean_s)
    assert waited[0] > 2 * waited[1]
