"""Every rule names the fault that it is for, alone, and says nothing just below its threshold."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.dashboard.doctor import cache_rules, index_rules, routing_rules
from router.dashboard.doctor.figures import DifferingShape, EngineFigures, Figures, ReplicaFigures
from router.dashboard.doctor.rules import PAGE, RULES, findings
from tests.router.dashboard.doctor.snapshots import (
    READINGS,
    ROUTER,
    all_worse,
    choices,
    fleet,
    replica,
    routed_worse,
    worse,
)

ROOT = Path(__file__).parents[4]


def named(figures: Figures) -> set[str]:
    return {finding.rule for finding in findings(figures)}


NO_HITS = {"hit_tokens": 0.0}
THRASHING = {"evicted_blocks": 167.0, "hit_tokens": 9_000.0}
COLD = {"full": 0.5, "evicted_blocks": 0.0, "hit_tokens": 9_900.0}
OFF = {"cached_blocks": 0.0, "hit_tokens_ever": 0.0, "events_ever": 0.0, "full": 0.1, "evicted_blocks": 0.0} | NO_HITS
EACH_TURN = 10  # choices in half a second
HERDED = choices("abcab", each=EACH_TURN)
SALTED: dict[str, Any] = {"salted": 100.0}
LOST: dict[str, Any] = {"evicted_tokens": 20_000.0}
SWING = {f"r{number}": tuple(3000.0 if turn % 3 == number else 0.0 for turn in range(READINGS)) for number in range(3)}


DIFFERING = DifferingShape(model="m", shape="chat; first>user, user>last", replica="r0", token=3, here="a", there="b")


def swinging(**changes: tuple[float, ...]) -> Figures:
    queues = SWING | changes
    three = [replica(name, queued_tokens=queue) for name, queue in queues.items()]
    return replace(fleet(), replicas=tuple(three))


def hot(first: float, others: float, always: bool = True) -> Figures:
    busy = (first,) * (READINGS - 1) + (first if always else others - 1,)
    return fleet(replica("r0", busy=busy), busy=(others,) * READINGS)


def warm(first: float) -> Figures:
    """One replica is busy, since the policy has found what is asked for in its cache."""
    return replace(hot(first, 0.0), router=replace(ROUTER, choices=choices("a" * 30, cached=True)))


# rule -> what it names, and what it is just not yet
PLANTED: dict[str, tuple[list[Figures], list[Figures]]] = {
    "no-replicas": ([replace(fleet(), replicas=())], [fleet()]),
    "replica-down": (
        [worse(available=False, why="connection refused (faults in a row: 3)", breaker="open")],
        [worse(available=True)],
    ),
    "engine-stalled": (
        [
            worse(available=False, why="its engine sleeps"),
            worse(available=False, why="its engine computes nothing: no token, event or count for 3.1 s"),
        ],
        [worse(available=False, why="its breaker is open"), worse(available=True)],
    ),
    "replica-draining": (
        [worse(available=False, why="draining"), worse(available=False, why="it drains"), worse({"draining": True})],
        [worse({"draining": False})],
    ),
    "replica-unsteady": ([worse(faults=1.0), worse(restarts=1.0), worse(breaker="half-open")], [worse(faults=0.0)]),
    "name-taken": (
        [worse(taken_names={"sql": "base-1"}), worse(taken_names={"sql": "base-1", "chat": "base-1"})],
        [worse(taken_names={})],
    ),
    "starved-of-cpu": ([worse({"cpu_wait_s": 2.5})], [worse({"cpu_wait_s": 1.9}), worse({"cpu_wait_s": None})]),
    "requests-refused": (
        [
            routed_worse(refused={"queue_full": 4.0}),
            worse(refused=4.0),
            routed_worse(refused={"rate_limit_exceeded": 9.0}),
        ],
        [
            routed_worse(refused={"queue_full": 3.0}),
            routed_worse(refused={"model_not_found": 99.0}),
            worse({"refused": 9.0}),
        ],
    ),
    "caching-off": (
        [worse(OFF), worse({"caching": False} | NO_HITS)],
        [
            worse(OFF | {"prompt_tokens_ever": 4095.0, "hit_tokens": 2e4}),
            worse({"caching": True}),
            worse({"cached_blocks": 0.0}),
        ],
    ),
    "salt-per-request": (
        [
            all_worse(new_salts=50.0, **SALTED),
            fleet(replica(own=NO_HITS, new_salts=99.0, **SALTED), new_salts=99.0, salted=100.0),
        ],
        [
            all_worse(new_salts=49.0, **SALTED),
            all_worse(salted=6.0, new_salts=6.0),
            all_worse(salted=20.0, new_salts=20.0),
        ],
    ),
    "billing-line": (
        [worse(NO_HITS, billed=20.0), worse(THRASHING, billed=100.0, **LOST), worse(COLD, billed=100.0)],
        [worse(NO_HITS, billed=19.0), worse({"hit_tokens": 10_100.0}, billed=100.0)],
    ),
    "thrashing": (
        [worse(THRASHING, **LOST), worse(THRASHING, unknown_tokens=99_000.0)],
        [worse(THRASHING, evicted_tokens=19_000.0, predictions=0.0), worse({"evicted_blocks": 5e3}, **LOST)],
    ),
    "cache-too-small": (
        [
            worse(**LOST),
            worse(THRASHING | {"evicted_blocks": 166.0}, **LOST),
            worse(THRASHING | {"hit_tokens": 1e4}, **LOST),
            fleet(replace(replica(**LOST), own=None)),
        ],
        [
            worse(evicted_tokens=19_900.0),
            worse({"full": 0.94}, **LOST),
            worse({"evicted_blocks": 0.0}, **LOST),
            worse(unknown_tokens=40_000.0, **LOST),
        ],
    ),
    "low-hits": (
        [worse(COLD), worse(COLD | {"prompts": 50.0}), worse(THRASHING, evicted_tokens=19_000.0)],
        [worse(COLD | {"hit_tokens": 10_100.0}), worse(COLD | {"prompts": 49.0, "prompt_tokens": 49_000.0})],
    ),
    "prompts-not-block-aligned": (
        [worse({"query_blocks": 4_680.0}), worse({"query_blocks": 0.0, "prompt_tokens": 1_500.0} | NO_HITS)],
        [worse({"query_blocks": 4_700.0}), worse({"query_blocks": 4_680.0, "prompts": 9.0})],
    ),
    "too-few-at-once": (
        [
            worse({"running": 2.0, "waiting": 1.0, "usage": 0.89}),
            worse({"running": 3.0, "waiting": 4.0, "engine": "sglang"}),
        ],
        [
            worse({"running": 2.0, "waiting": 0.0}),
            worse({"running": 4.0, "waiting": 4.0}),  # the router has seen it with no more than these
            worse({"running": 2.0, "waiting": 4.0, "usage": None}),
            worse({"running": 0.0, "waiting": 4.0}),
        ],
    ),
    "kv-nearly-full": ([worse({"usage": 0.9})], [worse({"usage": 0.899})]),
    "preemptions": (
        [worse({"preemptions": 2.0}), worse({"preemptions": 10.0, "prompts": 1000.0})],
        [worse({"preemptions": 1.0}), worse({"preemptions": 9.0, "prompts": 1000.0})],
    ),
    "hot-replica": (
        [hot(8.0, 2.0), hot(400.0, 100.0)],
        [hot(7.9, 0.0), hot(8.0, 2.1), hot(90.0, 2.0, always=False), warm(90.0)],
    ),
    "herding": (
        [routed_worse(choices=HERDED), swinging()],
        [
            routed_worse(choices=choices("abca", each=EACH_TURN)[:-3]),
            routed_worse(choices=choices("abcab", each=EACH_TURN, cached=True)),
            routed_worse(choices=choices("aaaaa", each=EACH_TURN)),
            routed_worse(choices=choices("aaaaaaabbbcccc" * 4)),
            swinging(r0=(2000.0,) * READINGS),
            swinging(r0=(0.0,) * READINGS, r1=(3000.0,) * READINGS, r2=(0.0,) * READINGS),
        ],
    ),
    "no-events": ([worse(has_events=False, state="approximate", predictions=0.0)], [worse(has_events=True)]),
    "false-claims": (
        [
            worse(
                state="partial", overclaim="it claims to hold more than the 1,000 blocks that its pool has", trust=0.0
            ),
            worse(trust=0.5, honesty=0.5, wrong_predictions=50.0, resyncs=1.0),
        ],
        [worse(trust=0.0, honesty=1.0)],  # its blocks are evicted before requests come, and it says so
    ),
    "index-inexact": (
        [
            worse(state="partial", inexact="the replay socket does not answer"),
            worse(state="syncing", inexact="a repair"),
        ],
        [worse(state="exact")],
    ),
    "event-lag": ([worse(lag_batches=20)], [worse(lag_batches=19)]),
    "event-losses": (
        [worse(lost_batches=1.0), worse(gaps=2.0, repairs=2.0), worse(digest_mismatches=1.0)],
        [worse(gaps=1.0, repairs=1.0)],
    ),
    "unknown-events": ([worse(unknown={"BlockInactive": 3, "BlockStored.origin": 9})], [worse(unknown={})]),
    "approximate-prompts": (
        [
            routed_worse(approximate={"the tokenizer here is not that of r0: token 3 is 5 there and 4 here": 3.0}),
            routed_worse(approximate={"it has no tokenizer here": 300.0}),
        ],
        [routed_worse(approximate={"it has no tokenizer here": 2.0})],
    ),
    "prompts-differ": (
        [routed_worse(differing=(DIFFERING,)), routed_worse(differing=(DIFFERING, DIFFERING))],
        [routed_worse(approximate={"shape": 2.0})],
    ),
    "wrong-predictions": (
        [worse(wrong_predictions=5.0), worse(predictions=20.0, wrong_predictions=1.0), worse(resyncs=1.0)],
        [worse(wrong_predictions=4.9), worse(predictions=19.0, wrong_predictions=19.0)],
    ),
}


def test_a_healthy_fleet_has_no_findings() -> None:
    assert findings(fleet()) == []


def test_every_rule_is_planted() -> None:
    assert set(PLANTED) == set(RULES)


@pytest.mark.parametrize(("rule", "figures"), [(rule, each) for rule, (above, _) in PLANTED.items() for each in above])
def test_a_fault_is_named_and_no_other_with_figures_and_a_knob(rule: str, figures: Figures) -> None:
    assert named(figures) == {rule}
    for finding in findings(figures):
        assert finding.figures and finding.what and finding.turn


@pytest.mark.parametrize(("rule", "figures"), [(rule, each) for rule, (_, below) in PLANTED.items() for each in below])
def test_just_below_its_threshold_a_rule_is_silent(rule: str, figures: Figures) -> None:
    assert rule not in named(figures)


def test_a_finding_names_the_replica_the_setting_and_the_figures() -> None:
    [finding] = findings(worse(THRASHING, **LOST, kept_tokens=5_000.0, prefill_tokens_per_s=10_000.0))
    assert (finding.rule, finding.replica, finding.anchor) == ("thrashing", "r0", "docs/troubleshooting.md#thrashing")
    assert "--num-blocks" in finding.turn
    assert finding.figures["hit_share"] == 0.09
    assert finding.figures["evicted_share"] == 0.2 and finding.figures["of_these_kept_by_one_replica"] == 0.25
    assert finding.figures["gpu_s_per_hour_at_most"] == pytest.approx(2 * 360)  # two seconds in ten


def test_without_a_router_thrashing_is_distinguished_from_nothing_but_the_cache() -> None:
    alone = ReplicaFigures(name="r", block_tokens=16, own=replace(replica().own or EngineFigures(), **THRASHING))
    [finding] = findings(replace(fleet(), router=None, replicas=(alone,)))
    assert finding.rule == "thrashing"
    assert "no prompts are alike" in finding.what


def test_a_replica_that_says_that_it_sends_no_events_is_named_without_a_router() -> None:
    alone = ReplicaFigures(name="r", block_tokens=16, own=replace(replica().own or EngineFigures(), sends_events=False))
    assert named(replace(fleet(), router=None, replicas=(alone,))) == {"no-events"}


def test_a_router_that_ignores_prefixes_is_distinguished_from_unshared_prompts() -> None:
    [unlike] = findings(worse(COLD))
    elsewhere = replace(worse(COLD, elsewhere_tokens=60_000.0), router=routed_worse(policy="round-robin").router)
    [not_by_prefix] = findings(elsewhere)
    assert "share no prefixes" in unlike.what
    assert "--policy cost instead of round-robin" in not_by_prefix.turn


def test_without_its_own_metrics_a_replica_is_judged_by_the_router() -> None:
    dark = replace(replica(), own=None)
    assert findings(fleet(dark)) == []
    cold = replace(replica(reported_blocks=0.0), own=None)
    assert named(fleet(cold)) == {"low-hits"}


def test_foreign_engines_are_told_their_own_flags() -> None:
    foreign = replace(replica(has_events=False, state="approximate", predictions=0.0), engine="vllm")
    [finding] = findings(fleet(foreign))
    assert "--kv-events-config" in finding.turn


NUMBERS = st.floats(0, 1e6, allow_nan=False)


@given(st.lists(NUMBERS, min_size=8, max_size=8), st.floats(0, 1), st.floats(0, 1), st.sampled_from([0, 1, 16, 512]))
def test_no_figures_are_too_odd_to_judge(numbers: list[float], usage: float, full: float, block_tokens: int) -> None:
    names = ("evicted_blocks", "query_tokens", "hit_tokens", "query_blocks", "prompts", "prompt_tokens", "preemptions")
    own: dict[str, Any] = dict(zip(names, numbers, strict=False)) | {"usage": usage, "full": full}
    odd = replace(replica("r0", own, requests=numbers[7], new_salts=numbers[0]), block_tokens=block_tokens)
    causes = named(fleet(odd)) & {"caching-off", "thrashing", "cache-too-small", "low-hits"}
    assert len(causes) <= 1, "one cause, one finding"


@given(st.floats(0.5, 100), st.floats(0.5, 100))
def test_what_holds_in_a_look_holds_in_a_longer_one_of_the_same_pace(scale: float, more: float) -> None:
    figures = worse({"evicted_blocks": 300.0 * scale, "hit_tokens": 5_000.0}, **LOST)
    longer = worse({"evicted_blocks": 300.0 * scale * more, "hit_tokens": 5_000.0}, **LOST)
    longer = replace(longer, window_s=10.0 * more)
    assert ("thrashing" in named(figures)) is ("thrashing" in named(longer))


def test_thresholds_have_a_reason() -> None:
    for module in (cache_rules, index_rules, routing_rules):
        source = Path(str(module.__file__)).read_text()
        constants = re.findall(r"^[A-Z_]+ = [\d.]+(.*)$", source, re.MULTILINE)
        assert constants
        plain = {"ENOUGH_PROMPTS", "TURNS", "QUEUE_READINGS", "SALTED_PROMPTS", "PREDICTIONS"}
        for line in re.findall(r"^([A-Z_]+) = [\d.]+$", source, re.MULTILINE):
            assert line in plain, f"{line} has no comment with a reason"


# ---- the page


def test_the_page_has_a_section_for_every_rule_and_no_other() -> None:
    page = (ROOT / PAGE).read_text()
    titles = re.findall(r"^### (.+)$", page, re.MULTILINE)
    anchors = [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles]
    assert tuple(anchors) == RULES
