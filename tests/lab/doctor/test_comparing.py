"""Two samples of any engine become figures; missing values are reported or left out, never taken for faults."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lab.doctor.comparing import Loaded, Look, OfReplica, OfRouter, figures_of
from lab.doctor.report import figures_in_words, lines, summary
from router.console.samples import BadMetrics, Samples
from router.dashboard.doctor.engine_metrics import MetricsDelta
from router.dashboard.doctor.figures import Figures
from router.dashboard.doctor.rules import findings
from router.responses import Considered, DecisionRecord, FeedState, Index, Load, ReplicaStatus, Served
from tests.router.dashboard.doctor.snapshots import replica

URL = "http://10.0.0.1:8000"

VLLM = """\
vllm:cache_config_info{{block_size="16",enable_prefix_caching="{caching}",num_gpu_blocks="1000",engine="0"}} 1.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.2
vllm:num_preemptions_total{{engine="0",model_name="m"}} {preempted}
vllm:num_preemptions_total{{engine="1",model_name="m"}} 0.0
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {queries}
vllm:request_prompt_tokens_count{{engine="0",model_name="m"}} {prompts}
"""
SGLANG = """\
sglang:token_usage{{model_name="m"}} {usage}
sglang:prompt_tokens_total{{model_name="m"}} {queries}
sglang:cached_tokens_total{{model_name="m",cache_source="device"}} {hits}
sglang:num_requests_total{{model_name="m"}} {prompts}
sglang:num_retracted_requests_total{{model_name="m"}} {preempted}
"""
USUAL = {"caching": "True", "usage": 0.5, "preempted": 0, "queries": 0, "hits": 0, "prompts": 0}
LATER = {"queries": 100_000, "hits": 80_000, "prompts": 100}


def metrics(engine: str, **fields: object) -> OfReplica:
    return OfReplica(Samples(engine.format(**(USUAL | fields))))


def alone(first: OfReplica, last: OfReplica) -> Figures:
    return figures_of(Look(0.0, None, {URL: first}), [], Look(10.0, None, {URL: last}))


def rules(figures: Figures) -> list[str]:
    return [finding.rule for finding in findings(figures)]


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_other_engines_are_understood(engine: str) -> None:
    figures = alone(metrics(engine), metrics(engine, **LATER))
    [replica] = figures.replicas
    assert replica.own is not None
    assert (replica.hit_share, replica.own.usage, replica.own.prompts, replica.own.preemptions) == (0.8, 0.5, 100, 0)
    assert rules(figures) == []


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_faults_of_other_engines_are_named(engine: str) -> None:
    full = alone(metrics(engine, usage=0.95), metrics(engine, usage=0.97, preempted=7, **LATER))
    assert rules(full) == ["kv-nearly-full", "preemptions"]
    cold = alone(metrics(engine), metrics(engine, **LATER | {"hits": 100}))
    assert rules(cold) == ["low-hits"]


def test_vllm_says_itself_that_caching_is_off() -> None:
    later = LATER | {"hits": 0}
    assert rules(alone(metrics(VLLM, caching="False"), metrics(VLLM, caching="False", **later))) == ["caching-off"]


def test_a_moment_of_full_use_is_not_full_use() -> None:
    assert rules(alone(metrics(VLLM, usage=0.99), metrics(VLLM, usage=0.7, **LATER))) == []


def test_what_is_no_engine_is_not_judged() -> None:
    other = OfReplica(Samples("up 1\n"), Loaded())
    [replica] = alone(other, other).replicas
    assert replica.own is None


# ---- through a router

AT_FIRST = dict.fromkeys(("busy", "lag", "lost", "requests", "refused", "tokens", "evicted"), 0) | {"index": 990}


def status(**fields: int) -> ReplicaStatus:
    it = AT_FIRST | fields
    return ReplicaStatus(
        name="a",
        url=URL,
        engine="vllm",
        models=["m"],
        state="exact",
        block_size=16,
        load=Load(queued_tokens=100, running=1, waiting=2, in_flight=it["busy"]),
        index=Index({"GPU": it["index"]}),
        events=FeedState(lag_batches=it["lag"], lost_batches=it["lost"]),
        served=Served(
            it["requests"] + it["refused"],
            prompt_tokens=it["tokens"],
            refused=it["refused"],
            evicted_tokens=it["evicted"],
        ),
    )


def look(
    at_s: float, there: ReplicaStatus, own: OfReplica | str = "away", decisions: list[DecisionRecord] | None = None
) -> Look:
    return Look(at_s, OfRouter(Samples(), [there], decisions), {URL: own})


def routed(
    last: dict[str, int],
    own: tuple[OfReplica | str, OfReplica | str] = ("away", "away"),
    between: tuple[dict[str, int], ...] = (),
) -> Figures:
    readings = [[status(**each)] for each in between]
    return figures_of(look(0.0, status(), own[0]), readings, look(10.0, status(**last), own[1]))


def test_evictions_that_an_engine_does_not_count_are_distinguished_from_the_index() -> None:
    """Blocks that were computed without growth of the cache replaced others."""
    queries = {"queries": 100_000, "hits": 1_000, "prompts": 100}
    figures = routed(
        {"requests": 100, "tokens": 100_000, "evicted": 90_000, "index": 1000},
        (metrics(VLLM), metrics(VLLM, **queries)),
    )
    [replica] = figures.replicas
    assert replica.own is not None
    assert (replica.own.full, replica.own.evicted_blocks) == (1.0, 99_000 / 16 - 10)
    assert rules(figures) == ["thrashing"]


def test_without_its_own_metrics_the_router_alone_judges_and_says_so() -> None:
    figures = routed({"requests": 100, "refused": 50, "lost": 3})
    assert rules(figures) == ["requests-refused", "event-losses"]
    assert any("cannot be had (away)" in note for note in figures.notes)
    assert any("--admin-key" in note for note in figures.notes)


def test_lag_counts_if_it_was_there_at_every_reading() -> None:
    late = {"lag": 50}
    assert routed(late, between=(late,)).replicas[0].routed is not None
    then, now = look(0.0, status(**late)), look(10.0, status(**late))
    assert rules(figures_of(then, [[status(**late)]], now)) == ["event-lag"]
    assert rules(figures_of(then, [[status()]], now)) == []


def test_a_replica_is_as_busy_as_the_router_or_itself_says() -> None:
    [replica] = routed({"busy": 7}, between=({"busy": 2},)).replicas
    assert replica.routed is not None
    assert list(replica.routed.busy) == [3, 3, 7]
    assert list(replica.routed.queued_tokens) == [100, 100, 100]


def test_decisions_of_before_do_not_count_and_choices_that_a_cache_explains_are_marked() -> None:
    def decision(request_id: str, here: int, there: int) -> DecisionRecord:
        candidates = [Considered("a", here, 1.0), Considered("b", there, 2.0), Considered("c", 9999, None)]
        return DecisionRecord(
            10.0, request_id, policy="prefix", chosen="a", prompt_tokens=500, duration_s=2.0, candidates=candidates
        )

    old, *new = [decision("old", 0, 0), decision("warm", 160, 16), decision("cold", 0, 320), decision("even", 16, 16)]
    router = figures_of(look(0.0, status(), decisions=[old]), [], look(10.0, status(), decisions=[*new, old])).router
    assert router is not None
    assert router.choices is not None
    assert [(one.at_s, one.cached) for one in router.choices] == [(8.0, True), (8.0, False), (8.0, False)]
    assert router.policy == "prefix"


# ---- counters


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=2))
def test_a_counter_that_fell_was_started_over(values: list[float]) -> None:
    before, now = values
    grown = MetricsDelta(Samples(f"a_total {before}\n"), Samples(f"a_total {now}\n")).grown("a_total")
    assert grown == (now - before if now >= before else now)


def test_missing_counters_are_not_0_and_of_two_names_the_first_that_is_there_counts() -> None:
    assert MetricsDelta(Samples(""), Samples("")).grown("a_total", "b_total") is None
    both = Samples("a 1\nb 2\n")
    assert (both.total("x", "b", "a"), both.most("a"), both.total("x")) == (2, 1, None)


@pytest.mark.parametrize("text", ["<html>\n", 'a{b="c\n', "a\n"])
def test_what_is_no_metrics_is_refused(text: str) -> None:
    with pytest.raises(BadMetrics):
        Samples(text)


# ---- words


def test_nothing_wrong_is_one_line_with_the_figures() -> None:
    figures = alone(metrics(VLLM), metrics(VLLM, **LATER))
    assert list(lines(figures, [])) == [
        "nothing wrong: 1 replica, 100 requests in 10 s, 80% of the prompt tokens hit, "
        "at most 50% of a KV cache held by requests"
    ]


def test_without_requests_a_message_says_what_was_not_judged() -> None:
    idle = replace(alone(metrics(VLLM), metrics(VLLM)), notes=("a note",))
    assert list(lines(idle, []))[1:] == ["no requests came: rules that need load were not checked", "note: a note"]
    assert "hit" not in summary(idle)


def test_an_index_that_no_answer_was_compared_with_is_not_called_exact_without_saying_so() -> None:
    quiet = replica(predictions_ever=0.0)
    told = list(lines(Figures(window_s=10.0, replicas=(quiet,)), []))
    assert told[0].startswith("nothing wrong in what was seen: ") and told[0].endswith(
        "index exact by its events alone"
    )
    assert told[1:] == ["no answer has been compared with the index of r0 yet"]
    proved = Figures(window_s=10.0, replicas=(replica(predictions_ever=1.0),))
    assert [line.endswith("index exact") for line in lines(proved, [])] == [True]


def test_figures_are_reported_in_words() -> None:
    told = figures_in_words(
        {"hit_share": 0.123, "evicted_blocks_per_s": 1234.5, "changes": 3.0, "rate": 0.5, "why": ""}
    )
    assert told == "hit share 12%, evicted blocks per s 1,234, changes 3, rate 0.5"


def test_a_ranks_figures_are_its_own() -> None:
    both = Samples(
        'vllm:a_total{engine="0"} 1\nvllm:a_total{engine="1"} 2\nvllm:b 5\nsglang:a_total{dp_rank="1",engine="x"} 7\n'
    )
    first, second = both.of_rank(0), both.of_rank(1)
    assert (first.total("vllm:a_total"), second.total("vllm:a_total")) == (1, 2)
    assert first.total("vllm:b") == 5 and first.total("sglang:a_total") is None and second.total("sglang:a_total") == 7
