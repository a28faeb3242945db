"""Event sockets and data-parallel ranks from engines' own answers."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.sglang import read_sources as sglang_sources
from engines.sources import MAX_RANKS, Publisher, Sources
from engines.vllm import read_sources as vllm_sources
from events.source import Source
from router.members.facts import ranks_of, reachable
from router.members.spec import ReplicaSpec


def spec(url: str = "http://10.0.0.1:8000", **fields: Any) -> ReplicaSpec:
    return ReplicaSpec(name="r", url=url, engine="vllm", model="m", **fields)


def published(rank: int = 0, **fields: Any) -> dict[str, Any]:
    """A rank in vLLM 0.33's answer, as it was recorded."""
    usual = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{10200 + rank}",
        "replay_endpoint": f"tcp://*:{11200 + rank}",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "",
    }
    return usual | fields


def vllm(**by_rank: dict[str, Any]) -> Sources:
    return vllm_sources(200, json.dumps({number.removeprefix("r"): one for number, one in by_rank.items()}).encode())


def sglang(version: str = "0.5.14", **fields: Any) -> Sources:
    config = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557", "topic": "kv"}
    usual = {"kv_events_config": json.dumps(config), "dp_size": 1, "version": version, "page_size": 1}
    return sglang_sources(200, json.dumps(usual | fields).encode())


# ---- one rank


def test_the_sockets_of_an_engine_are_found_at_its_own_host() -> None:
    [rank] = ranks_of(spec(), vllm(r0=published(topic="kv")))
    assert (rank.spec.name, rank.number, rank.header, rank.why_no_events) == ("r", None, b"", "")
    assert rank.spec.events == "tcp://10.0.0.1:10200" and rank.spec.replay == "tcp://10.0.0.1:11200"
    assert rank.spec.topic == "kv"


def test_an_address_of_ip_version_6_is_put_into_brackets() -> None:
    [rank] = ranks_of(spec("http://[fd00::1]:8000"), vllm(r0=published(endpoint="tcp://[::]:5557")))
    assert rank.spec.events == "tcp://[fd00::1]:5557" and rank.spec.source() is not None


def test_typed_sockets_win_over_those_that_are_found() -> None:
    typed = spec(events="tcp://proxy:1", replay="tcp://proxy:2", topic="mine")
    [rank] = ranks_of(typed, vllm(r0=published(topic="kv")))
    assert (rank.spec.events, rank.spec.replay, rank.spec.topic) == ("tcp://proxy:1", "tcp://proxy:2", "mine")


def test_events_that_are_switched_off_here_stay_off() -> None:
    [rank] = ranks_of(spec(events="off"), vllm(r0=published()))
    assert rank.spec.source() is None and not rank.why_no_events


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        (vllm_sources(404, b"{}"), "before 0.33 .* name them: events="),
        (vllm_sources(200, b"{}"), "publishes no cache events: start it with --kv-events-config"),
        (vllm_sources(401, b""), "answers /kv_event_sources with status 401: name them"),
        (vllm_sources(200, b"[]"), "cannot be read .* name them"),
        (vllm_sources(200, b'{"a": {}}'), "cannot be read .* name them"),
        (vllm_sources(200, b'{"0": {"endpoint": 5}}'), "cannot be read .* name them"),
        (vllm_sources(200, b"[" * 100_000), "cannot be read"),
        (vllm(r0=published(enable_kv_cache_events=False)), "publishes no cache events: start it"),
        (vllm(r0=published(publisher="null")), "publishes no cache events: start it"),
        (vllm(r0=published(endpoint="tcp://0.0.0.0:5557")), "sends its events to tcp://0.0.0.0:5557, which is not"),
        (vllm(r0=published(endpoint="tcp://collector:5557")), "sends its events to tcp://collector:5557, which is not"),
        (vllm(r0=published(endpoint="tcp://127.0.0.1:5557")), "only on its own machine .* start it with"),
        (vllm(r0=published(endpoint="inproc://x")), "'inproc://x' cannot be reached from here: start it"),
        (vllm(r0=published(endpoint="ipc:///tmp/x")), "cannot be reached from here"),
        (vllm(r0=published(endpoint="tcp://*:99999")), "write tcp://HOST:PORT"),
        (sglang_sources(404, b""), "answers /server_info with status 404: name them"),
        (sglang(kv_events_config=None), "publishes no cache events"),
        (sglang(kv_events_config="{}"), "publishes no cache events"),
        (sglang(kv_events_config="{"), "cannot be read"),
        (sglang(dp_size=0), "cannot be read"),
        (sglang(kv_events={"load_endpoint_port_base": 65_535}), "cannot be read"),
    ],
)
def test_an_engine_that_cannot_be_followed_says_what_to_change(sources: Sources, why: str) -> None:
    [rank] = ranks_of(spec(), sources)
    assert rank.spec.source() is None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(rank.why_no_events)


def test_a_replay_socket_elsewhere_is_left_out_and_the_stream_is_followed() -> None:
    [rank] = ranks_of(spec(), vllm(r0=published(replay_endpoint="tcp://10.9.9.9:1")))
    assert (rank.spec.events, rank.spec.replay) == ("tcp://10.0.0.1:10200", None)


def test_a_replay_socket_is_bound_however_it_is_written() -> None:
    [rank] = ranks_of(spec(), vllm(r0=published(replay_endpoint="tcp://0.0.0.0:1")))
    assert rank.spec.replay == "tcp://10.0.0.1:1"


def test_sockets_of_this_machine_are_reached_from_this_machine() -> None:
    here = spec("http://localhost:8000")
    assert reachable(here, "tcp://127.0.0.1:5557") == "tcp://127.0.0.1:5557"
    assert reachable(here, "ipc:///tmp/x") == "ipc:///tmp/x"
    assert reachable(spec(), "tcp://10.0.0.1:5557") == "tcp://10.0.0.1:5557"


# ---- several


def test_each_rank_is_a_replica_of_its_own_that_is_steered_to() -> None:
    first, second = ranks_of(spec(), vllm(r0=published(0), r1=published(1)))
    assert (first.spec.name, first.number, first.header) == ("r@dp0", 0, b"x-data-parallel-rank: 0\r\n")
    assert (second.spec.name, second.number, second.header) == ("r@dp1", 1, b"x-data-parallel-rank: 1\r\n")
    assert (first.spec.events, second.spec.events) == ("tcp://10.0.0.1:10200", "tcp://10.0.0.1:10201")
    assert second.spec.replay == "tcp://10.0.0.1:11201"
    second.spec.check()


def test_the_header_counts_the_ranks_behind_the_url() -> None:
    ranks = ranks_of(spec(), vllm(r4=published(4), r5=published(5)))
    assert [(one.spec.name, one.header[-3:-2]) for one in ranks] == [("r@dp4", b"0"), ("r@dp5", b"1")]


def test_the_only_rank_behind_a_url_is_the_replica_itself() -> None:
    [rank] = ranks_of(spec(), vllm(r3=published(3)))
    assert (rank.spec.name, rank.number, rank.header, rank.spec.events) == ("r", None, b"", "tcp://10.0.0.1:10203")


def test_typed_sockets_are_those_of_rank_0() -> None:
    ranks = ranks_of(spec(events="tcp://h:100", replay="tcp://h:200"), vllm(r0=published(0), r1=published(1)))
    assert [(one.spec.events, one.spec.replay) for one in ranks] == [
        ("tcp://h:100", "tcp://h:200"),
        ("tcp://h:101", "tcp://h:201"),
    ]


def test_ranks_without_events_are_known_by_their_metrics() -> None:
    metrics = b"".join(b'vllm:num_requests_running{engine="%d",model_name="m"} 0.0\n' % rank for rank in (0, 1))
    ranks = ranks_of(spec(), vllm_sources(200, b"{}", metrics))
    assert [one.spec.name for one in ranks] == ["r@dp0", "r@dp1"]
    assert all("publishes no cache events" in one.why_no_events and one.header for one in ranks)


def test_ranks_that_cannot_be_chosen_are_one_replica_that_is_guessed() -> None:
    metrics = b'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_running{engine="1"} 0\n'
    for sources in (vllm_sources(404, b"", metrics), sglang("0.5.9", dp_size=2), sglang("main", dp_size=2)):
        [rank] = ranks_of(spec(events="tcp://h:1", replay="tcp://h:2"), sources)
        assert rank.spec.source() is None and rank.spec.name == "r" and not rank.header
        assert "2 data-parallel ranks cannot be chosen" in rank.why_no_events and "URL" in rank.why_no_events
    unsteered = msgspec.structs.replace(spec(), engine="openai")  # no header of its is known
    [rank] = ranks_of(unsteered, vllm(r0=published(0), r1=published(1)))
    assert "cannot be chosen" in rank.why_no_events


def test_sglangs_ranks_publish_on_ports_that_follow() -> None:
    ranks = ranks_of(spec(), sglang(dp_size=2))
    assert [(one.spec.events, one.spec.replay, one.spec.topic) for one in ranks] == [
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:6557", "kv"),
        ("tcp://10.0.0.1:5558", "tcp://10.0.0.1:6558", "kv"),
    ]
    assert [one.spec.status for one in ranks] == [None, None]
    described = {"load_endpoint_port_base": 5559, "load_topic": "load"}
    ranks = ranks_of(spec(), sglang(dp_size=2, kv_events=described))
    assert [one.spec.status for one in ranks] == ["tcp://10.0.0.1:5559", "tcp://10.0.0.1:5560"]
    config = json.dumps({"publisher": "zmq", "endpoint": "tcp://0.0.0.0:5557"})
    [rank] = ranks_of(spec(), sglang(kv_events_config=config))
    assert rank.spec.events == "tcp://10.0.0.1:5557"


def test_ranks_without_end_are_refused() -> None:
    many = {f"r{number}": published() for number in range(MAX_RANKS + 1)}
    assert "cannot be read" in vllm(**many).why_not
    assert "cannot be read" in sglang(dp_size=MAX_RANKS + 1).why_not
    engines = b"".join(b'vllm:num_requests_running{engine="%d"} 0\n' % number for number in range(999))
    assert len(vllm_sources(200, b"{}", engines).publishers) == MAX_RANKS


HOSTS = st.sampled_from(["*", "0.0.0.0", "[::]", "::", "127.0.0.1", "localhost", "10.0.0.1", "10.0.0.2", "evil", ""])
ENDPOINTS = st.builds("{}://{}:{}".format, st.sampled_from(["tcp", "ipc", "udp"]), HOSTS, st.integers(0, 70_000))


@given(st.one_of(ENDPOINTS, st.text(max_size=30)), st.one_of(st.none(), ENDPOINTS, st.text(max_size=30)))
def test_whatever_is_answered_only_the_own_host_is_followed(endpoint: str, replay: str | None) -> None:
    for rank in ranks_of(spec(), Sources({0: Publisher(True, "zmq", endpoint, replay), 1: None}, "it sends none")):
        source = rank.spec.source()
        assert (source is None) == bool(rank.why_no_events)
        if isinstance(source, Source):
            source.check()
            assert all(one.startswith("tcp://10.0.0.1:") for one in (source.events, source.replay) if one)
