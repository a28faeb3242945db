import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.cost import COMPUTE_WEIGHT, FLOODED_WEIGHT, Candidate, Tenant
from router.placement.shares import ACTIVE_S, BURST_S, GENERATED_WEIGHT, MAX_TENANTS, Shares

RATE = 1000.0
BURST = BURST_S * RATE
WEIGHTS = {"a": 1.0, "b": 4.0, "c": 0.25}
ONE, OTHER = Tenant("one"), Tenant("other")


def replicas(*, waiting: int = 1) -> list[Candidate]:
    """Two, at the first of which requests wait."""
    return [
        Candidate("a", 0, prefill_tokens_per_s=RATE / 2, waiting=waiting),
        Candidate("b", 1, prefill_tokens_per_s=RATE / 2),
    ]


def behind(shares: Shares, tenant: Tenant, now_s: float, *, waiting: int = 1) -> float:
    return shares.behind_s(tenant, replicas(waiting=waiting), now_s)


def test_who_is_alone_stands_back_for_nobody() -> None:
    shares = Shares()
    for second in range(5):
        assert behind(shares, ONE, second) == 0
        shares.asked(ONE, 1_000_000, second)


def test_who_is_alone_for_the_moment_leaves_room_for_one_more() -> None:
    shares = Shares()
    shares.others_may_come = True
    shares.asked(ONE, BURST, 0.0)
    assert behind(shares, ONE, 0.0) == 0, "a burst is no flood"
    shares.asked(ONE, 5000, 0.0)
    assert behind(shares, ONE, 0.0) == pytest.approx(5.0)
    assert behind(shares, ONE, 2.0) == pytest.approx(3.0)
    assert behind(shares, ONE, 6.0) == 0


def test_nobody_stands_back_where_nobody_waits() -> None:
    shares = Shares()
    shares.asked(ONE, 1_000_000, 0.0)
    shares.asked(OTHER, 1, 0.0)
    assert behind(shares, ONE, 0.0, waiting=0) == 0
    assert behind(shares, ONE, 0.0) == 0, "what was given while there was room is forgotten"


def test_a_tenant_stands_back_until_the_others_have_caught_up() -> None:
    shares = Shares()
    shares.asked(ONE, BURST + 3000, 0.0)
    for name in ("other", "third", "fourth"):
        shares.asked(Tenant(name), 1, 0.0)
    assert behind(shares, ONE, 0.0) == pytest.approx(9.0), "3 s of the replicas' work for it, 9 s for the three"
    assert behind(shares, OTHER, 0.0) == 0
    assert behind(shares, ONE, 4.0) == pytest.approx(6.0), "4 s of its share, a quarter of 1,000 tokens a second, later"
    assert behind(shares, ONE, 4.0) == pytest.approx(6.0)


def test_weights_divide_the_replicas() -> None:
    heavy, light = Tenant("heavy", weight=3.0), Tenant("light", weight=1.0)
    shares = Shares()
    for tenant in (heavy, light):
        shares.asked(tenant, BURST + 3000, 0.0)
    assert behind(shares, heavy, 0.0) == pytest.approx(1.0)
    assert behind(shares, light, 0.0) == pytest.approx(9.0)


def test_who_has_not_asked_for_long_takes_no_part() -> None:
    shares = Shares()
    shares.asked(OTHER, 1, 0.0)
    shares.asked(ONE, 1_000_000, ACTIVE_S + 1)
    assert behind(shares, ONE, ACTIVE_S + 1) == 0


def test_models_do_not_know_of_each_other() -> None:
    shares = Shares()
    shares.asked(Tenant("one", "m"), 5000, 0.0)
    shares.asked(Tenant("other", "n"), 5000, 0.0)
    assert behind(shares, Tenant("one", "m"), 0.0) == behind(shares, Tenant("other", "n"), 0.0) == 0


def test_generated_tokens_count_and_uncomputed_ones_do_not() -> None:
    shares = Shares()
    shares.asked(ONE, BURST + 5000, 0.0)
    shares.asked(OTHER, 1, 0.0)
    shares.spared(ONE, 5000)
    shares.used(ONE, 0, 500)
    assert behind(shares, ONE, 0.0) == pytest.approx(500 * GENERATED_WEIGHT / RATE)
    shares.spared(ONE, 10**9)
    assert behind(shares, ONE, 0.0) == 0
    shares.used(Tenant("never seen"), 7, 5)  # nothing to correct


def test_several_routers_each_see_a_part_of_the_requests() -> None:
    shares = Shares()
    shares.routers = 2
    shares.asked(ONE, BURST, 0.0)
    shares.asked(OTHER, 1, 0.0)
    assert behind(shares, ONE, 0.0) == pytest.approx(BURST_S), "the other router has seen as much"


def test_tenants_are_bounded() -> None:
    shares = Shares()
    for number in range(MAX_TENANTS + 5):
        shares.asked(Tenant(f"tenant-{number}"), 1, 0.0)
    assert len(shares._leads[""].of) == MAX_TENANTS
    shares.asked(ONE, 1, ACTIVE_S + 1)
    assert list(shares._leads[""].of) == ["one"], "those who have not asked for long make room"


@given(
    asked=st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 10**6), st.floats(0, 30)), min_size=1, max_size=30
    )
)
def test_a_lead_is_never_negative_nor_more_than_was_asked(asked: list[tuple[str, int, float]]) -> None:
    shares, given_tokens, now_s = Shares(), dict.fromkeys("abc", 0), 0.0
    last_s: dict[str, float] = {}
    for name, tokens, pause_s in asked:
        now_s += pause_s
        tenant = Tenant(name, weight=WEIGHTS[name])
        others = sum(WEIGHTS[one] for one, asked_s in last_s.items() if one != name and asked_s > now_s - ACTIVE_S)
        behind_s = behind(shares, tenant, now_s)
        assert 0 <= behind_s <= given_tokens[name] / RATE * others / WEIGHTS[name] + 1e-6
        shares.asked(tenant, tokens, now_s)
        last_s[name] = now_s
        assert shares._leads[""].weight_beside(name, now_s) == pytest.approx(others)
        given_tokens[name] += tokens
        assert all(0 <= lead.tokens <= given_tokens[who] for who, lead in shares._leads[""].of.items())


def test_a_tenant_is_cold_while_its_prompts_do_not_come_again() -> None:
    shares = Shares()
    shares.asked(ONE, 1, 0.0)
    shares.found(ONE, 100, 0)
    assert not shares.is_cold(ONE, 0.0) and shares.weight("", 0.0) == COMPUTE_WEIGHT, "each session begins so"
    for _ in range(30):
        shares.found(ONE, 16, 0)
    assert shares.is_cold(ONE, 0.0) and not shares.is_cold(OTHER, 0.0)
    assert shares.weight("", ACTIVE_S - 1) == FLOODED_WEIGHT
    assert shares.weight("", ACTIVE_S) == shares.weight("another model", 0.0) == COMPUTE_WEIGHT
    shares.found(ONE, 16, 16)
    assert not shares.is_cold(ONE, 0.0), "some of it has come again"
