"""Replicas' answers about themselves, read without trust."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from engines import METRICS, NATIVE, PROFILES
from engines.metrics import is_asleep, scraped_queues, scraped_steps
from router.members.facts import foreign_facts, native_facts
from router.members.spec import BadSpec, ReplicaSpec

LOAD = {"model": "m", "block_size": 16, "max_model_len": 4096, "tokenizer": "bytes", "incarnation": 7}
URL = "http://10.0.0.1:8000"


def spec(**fields: Any) -> ReplicaSpec:
    return ReplicaSpec(**{"name": "r", "url": URL, **fields})


def models(*listed: dict[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": listed}).encode()


def load(**fields: Any) -> bytes:
    return json.dumps(LOAD | fields).encode()


# ---- ours


def test_a_replica_of_ours_says_what_it_is() -> None:
    facts = native_facts(spec(), load(pool={"total": 100, "free": 3}, draining=True, unknown={"x": 1}))
    assert facts is not None and facts.profile is NATIVE and facts.draining
    assert (facts.models, facts.tokenizer, facts.total_blocks) == (("m",), "bytes", 100)
    assert (facts.spec.engine, facts.spec.block_size, facts.spec.max_model_len) == ("warmroute", 16, 4096)
    assert facts.spec.incarnation == 7


@pytest.mark.parametrize("answer", [b"", b"{", b"\xff", b"[]", b"{}", b'{"model": 1}', b'{"load": 0.5}'])
def test_another_answer_is_not_ours(answer: bytes) -> None:
    assert native_facts(spec(), answer) is None


def test_one_that_is_still_loading_is_not_taken_for_one_without_events() -> None:
    facts = native_facts(spec(), load(incarnation=None, endpoints=None))
    assert facts is not None and facts.loading and facts.models == ("m",)
    known = native_facts(spec(), load())
    assert known is not None and not known.loading


@pytest.mark.parametrize(
    ("said", "url", "endpoint"),
    [
        ("tcp://10.0.0.7:6000", URL, "tcp://10.0.0.7:6000"),
        ("tcp://*:6000", URL, "tcp://10.0.0.1:6000"),
        ("tcp://0.0.0.0:6000", "http://[fd00::1]:8000", "tcp://[fd00::1]:6000"),
        ("tcp://127.0.0.1:6000", "http://127.0.0.1:8000", "tcp://127.0.0.1:6000"),
        ("tcp://127.0.0.1:6000", URL, ""),
        ("ipc:///run/blocks", URL, ""),
        ("tcp://10.0.0.7:6000/../", URL, ""),
        ("tcp://10.0.0.7:6000\n", URL, ""),
        ("tcp://us er:6000", URL, ""),
        ("tcp://" + "a" * 300 + ":6000", URL, ""),
        ("", URL, ""),
        (None, URL, ""),
    ],
)
def test_blocks_are_read_where_the_replica_is(said: str | None, url: str, endpoint: str) -> None:
    facts = native_facts(spec(url=url), load(kv_read=said, kv_layout="qwen3 bf16 16"))
    assert facts is not None and facts.kv_read == endpoint
    assert bool(facts.kv_layout) == bool(endpoint)


def test_replicas_on_the_routers_machine_do_not_read_from_those_on_others() -> None:
    layouts = {
        facts.kv_layout
        for host in ("127.0.0.1", "10.0.0.1")
        if (facts := native_facts(spec(url=f"http://{host}:8000"), load(kv_read="tcp://*:6000", kv_layout="x")))
    }
    assert len(layouts) == 2 and "" not in layouts


def test_without_a_layout_nothing_is_read() -> None:
    for layout in (None, ""):
        facts = native_facts(spec(), load(kv_read="tcp://10.0.0.7:6000", kv_layout=layout))
        assert facts is not None and (facts.kv_read, facts.kv_layout) == ("", "")


# ---- others


def test_an_engine_says_what_it_serves() -> None:
    facts = foreign_facts(
        spec(),
        models(
            {"id": "m", "owned_by": "vllm", "max_model_len": 512, "root": "path"},
            {"id": "lora-b", "parent": "m", "owned_by": "vllm"},
            {"id": "lora-a", "parent": "m", "owned_by": "vllm"},
            {"id": "alias", "owned_by": "vllm"},
        ),
    )
    assert facts.models == ("m", "alias", "lora-a", "lora-b")
    assert facts.adapters == {"lora-a", "lora-b"}
    assert (facts.spec.model, facts.profile, facts.spec.max_model_len) == ("m", PROFILES["vllm"], 512)


@pytest.mark.parametrize(
    ("owner", "engine"), [("vllm", "vllm"), ("sglang", "sglang"), ("me", "openai"), (None, "openai")]
)
def test_an_engine_is_known_by_the_owner_of_its_models(owner: str | None, engine: str) -> None:
    assert foreign_facts(spec(), models({"id": "m", "owned_by": owner})).spec.engine == engine


def test_an_engine_that_was_named_stays_what_it_is() -> None:
    assert foreign_facts(spec(engine="sglang"), models({"id": "m", "owned_by": "vllm"})).spec.engine == "sglang"


def test_the_model_that_was_named_comes_first() -> None:
    facts = foreign_facts(spec(model="b"), models({"id": "a"}, {"id": "b"}))
    assert facts.models == ("b", "a") and facts.spec.model == "b"


def test_adapters_that_were_named_are_served() -> None:
    facts = foreign_facts(spec(adapters=("x",)), models({"id": "m"}))
    assert facts.models == ("m", "x") and facts.adapters == {"x"}


@pytest.mark.parametrize(
    ("named", "answer", "why"),
    [
        ({}, b"", "does not answer as OpenAI's does"),
        ({}, b"\xff", "does not answer as OpenAI's does"),
        ({}, b'{"data":[{"id":7}]}', "does not answer as OpenAI's does"),
        ({}, models(), "names no model"),
        ({}, models({"id": "lora", "parent": "m"}), "names no model"),
        ({"model": "other"}, models({"id": "m"}), "serves 'm', not 'other'"),
    ],
)
def test_what_cannot_be_used_is_refused(named: dict[str, Any], answer: bytes, why: str) -> None:
    with pytest.raises(BadSpec, match=why):
        foreign_facts(spec(**named), answer)


# ---- queues


@pytest.mark.parametrize(
    ("metrics", "queue"),
    [
        (b'vllm:num_requests_running{model_name="m"} 3.0\nvllm:num_requests_waiting{model_name="m"} 7.0\n', (3, 7)),
        (b"sglang:num_running_reqs 2\nsglang:num_queue_reqs 1e1\n", (2, 10)),
        (b'vllm:num_requests_running{e="0"} 1\nvllm:num_requests_running{e="1"} 2\n', (3, 0)),
        (b"# HELP vllm:num_requests_running x\nother 1\n", None),
        (b"", None),
        (b"vllm:num_requests_running NaN\n", None),
        (b"vllm:num_requests_running 1.2.3\n", None),
        (b"vllm:num_requests_running 1e999\n", None),
        (b"xvllm:num_requests_running 3\n", None),
    ],
)
def test_an_engines_queue_is_read_from_its_metrics(metrics: bytes, queue: tuple[int, int] | None) -> None:
    assert scraped_queues(metrics, METRICS).get(None) == queue


# ---- names that logs, terminals and metrics could not show


ODD_NAMES = ["m\n", "a\nb", "\x1b[2Jm", "m\r", "\u202em", "m\x85", "\u2028", "a\x00", "m\ufeff"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_that_cannot_be_printed_is_refused_wherever_it_comes_from(name: str) -> None:
    # Then it is asked as an engine of another kind, and refused with what it lists.
    assert native_facts(spec(), load(model=name)) is None
    assert native_facts(spec(), load(adapters=[name])) is None
    refused: list[Callable[[], object]] = [
        lambda: foreign_facts(spec(), models({"id": name})),
        lambda: foreign_facts(spec(), models({"id": "m"}, {"id": name, "parent": "m"})),
        lambda: spec(model=name).check(),
        lambda: spec(adapters=(name,)).check(),
    ]
    for read in refused:
        with pytest.raises(BadSpec) as error:
            read()
        assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "a model: \u00fcber, \u6a21\u578b", 'm{x="y"}\\'])
def test_other_names_stay(name: str) -> None:
    assert foreign_facts(spec(model=name), models({"id": name})).models == (name,)
    spec(model=name).check()


def test_only_what_an_engine_computes_is_a_sign_of_its_work() -> None:
    metrics = (
        'vllm:num_requests_waiting{engine="0"} 1.0\nhttp_requests_total{path="/metrics"} 1.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:prompt_tokens_total{engine="0"} 9.0\n'
        'sglang:token_usage{tp_rank="0"} 0.25\nsglang:num_queue_reqs 3.0\n'
    )
    before = scraped_steps(metrics.encode(), METRICS)
    for line, works in (
        ("waiting", 0),
        ("http", 0),
        ("queue", 0),
        ("usage_perc", 1),
        ("prompt", 1),
        ("token_usage", 1),
    ):
        later = re.sub(rf"({line}.*) [0-9.]+", r"\1 7.5", metrics, count=1)
        assert later != metrics and (scraped_steps(later.encode(), METRICS) != before) is bool(works), line


@pytest.mark.parametrize(("values", "asleep"), [((1.0,), False), ((0.0,), True), ((1.0, 0.0), True), ((), False)])
def test_an_engine_of_which_a_rank_sleeps_is_asleep(values: tuple[float, ...], asleep: bool) -> None:
    line = 'vllm:engine_sleep_state{{engine="{}",model_name="m",sleep_state="{}"}} {}\n'
    metrics = "".join(
        line.format(n, "awake", value) + line.format(n, "discard_all", 0.0) for n, value in enumerate(values)
    )
    assert is_asleep(metrics.encode(), METRICS) is asleep
