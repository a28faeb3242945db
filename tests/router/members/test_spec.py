"""Valid descriptions of a replica, and their effects."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.publisher import EventEndpoints
from events.sockets.curve import write_keys
from router.members.facts import NativeDescription, with_description
from router.members.spec import BadSpec, ReplicaSpec, by_name, parse_replica, spec_of

URL = "http://10.0.0.1:8000"
ANSWER = NativeDescription(
    model="m",
    block_size=16,
    max_model_len=4096,
    topic="kv@a@m",
    incarnation=7,
    endpoints=EventEndpoints("tcp://*:5557", "tcp://0.0.0.0:5558", "tcp://[::]:5559", "tcp://10.0.0.9:5560"),
)


def test_a_url_alone_is_named_by_its_address() -> None:
    assert parse_replica(URL) == ReplicaSpec(name="10.0.0.1:8000", url=URL)
    assert parse_replica("http://host").name == "host:80"
    assert parse_replica("https://[::1]:1/").url == "https://[::1]:1"
    assert parse_replica("http://h:1/v1/").url == parse_replica("url=http://h:1/v1").url == "http://h:1"


def test_pairs_say_the_rest() -> None:
    text = f"url={URL},name=a,engine=vllm,model=m,events=tcp://h:1,replay=tcp://h:2,topic=t,block_size=16,resume=true"
    assert parse_replica(text) == ReplicaSpec(
        name="a",
        url=URL,
        engine="vllm",
        model="m",
        events="tcp://h:1",
        replay="tcp://h:2",
        topic="t",
        block_size=16,
        resume=True,
    )


def test_the_url_may_stand_first_without_its_key() -> None:
    assert parse_replica(f"{URL},engine=sglang") == parse_replica(f"engine=sglang,url={URL}")


def test_adapters_are_named_one_by_one() -> None:
    assert parse_replica(f"{URL},adapter=sql,adapter=chat").adapters == ("sql", "chat")
    assert spec_of({"url": URL, "adapters": ["sql", "chat"]}).adapters == ("sql", "chat")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10.0.0.1:8000", "'10.0.0.1:8000' in '10.0.0.1:8000' is not key=value; write http://HOST:PORT"),
        ("", "'' in '' is not key=value"),
        ("ftp://h:1", "is not key=value"),
        ("url=ftp://h:1", "url is 'ftp://h:1'; write http://HOST:PORT"),
        ("url=h:1", "url is 'h:1'; write http"),
        ("http://h:99999", "url is 'http://h:99999'; write http"),
        ("http://[h:1", "url is 'http://[h:1'; write http"),
        ("http://a b:1,name=a", "url is 'http://a b:1'; write http"),
        ("name=a", "the url is missing; write url=http://HOST:PORT"),
        (f"{URL},event=tcp://h:1", "'event' in "),
        (f"{URL},event=tcp://h:1", "did you mean 'events'?"),
        (f"{URL},zzz=1", "the keys are name, url, engine"),
        (f"{URL},api_key=secret", "write api_key_env=VARIABLE"),
        (f"{URL},draining=true", "'draining' in"),
        (f"{URL},engine=vlm", "engine is 'vlm'; write auto, warmroute, vllm, sglang, trtllm or openai"),
        (f"{URL},block_size=x", "block_size is 'x': expected"),
        (f"{URL},block_size=0", "block_size is 0; write a whole number above 0"),
        (f"{URL},resume=perhaps", "resume is 'perhaps': expected"),
        (f"{URL},model=", "model in"),
        (f"{URL},model=a,model=b", "appears twice; give it once"),
        (f"{URL},name=a b", "the name 'a b' is not usable"),
        (f"{URL},name=a/b", "the name 'a/b' is not usable"),
        (f"{URL},name=.", "the name '.' is not usable"),
        (f"{URL},name=..", "the name '..' is not usable"),
        (f"{URL},replay=tcp://h:1", "replay without events (events is missing); name that endpoint too"),
        (f"{URL},events=off,replay=tcp://h:1", "replay without events (events is 'off')"),
        (f"{URL},events=h:1", "events is 'h:1'; write tcp://HOST:PORT"),
        (f"{URL},events=on", "events is 'on'; write tcp://HOST:PORT"),
        (f"{URL},events=tcp://*:1", "events is 'tcp://*:1', a bind address; give the publisher's host"),
        (f"{URL},curve_secret=mine", "curve_server and curve_secret belong together"),
        (f"{URL},api_key_env=sk-12345", "write the name of the variable, not the key itself"),
    ],
)
def test_what_is_wrong_is_quoted_with_what_to_write(text: str, said: str) -> None:
    with pytest.raises(BadSpec) as caught:
        parse_replica(text)
    assert said in str(caught.value)
    assert "secret'" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"url": 5}, "the url is 5"),
        ({"url": URL, "block_size": "16"}, "block_size is '16': expected `int"),
        ({"url": URL, "adapters": "sql"}, "adapters is 'sql': expected `array`"),
        ({"url": URL, "adapters": [1]}, "adapters is [1]: expected `str`"),
    ],
)
def test_fields_of_a_file_have_their_types(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSpec) as caught:
        spec_of(fields)
    assert said in str(caught.value)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(BadSpec, match=r"two replicas are named 'a': http://h:1 and http://h:2"):
        by_name([parse_replica("http://h:1,name=a"), parse_replica("http://h:2,name=a")])


# ---- the source of events


def test_without_events_there_is_no_source() -> None:
    assert parse_replica(URL).source() is None
    assert parse_replica(f"{URL},events=off").source() is None


def test_the_source_is_named_like_the_replica() -> None:
    source = parse_replica(f"{URL},name=a,model=m,topic=t,events=tcp://h:1,replay=tcp://h:2").source()
    assert source is not None
    assert (source.name, source.events, source.replay, source.topic, source.model) == (
        "a",
        "tcp://h:1",
        "tcp://h:2",
        "t",
        "m",
    )
    assert not source.native


def test_the_source_has_the_keys_that_files_hold(tmp_path: Path) -> None:
    public, _ = write_keys(str(tmp_path / "replica"))
    _, secret = write_keys(str(tmp_path / "router"))
    spec = parse_replica(f"{URL},events=tcp://h:1,curve_server={public},curve_secret={secret}")
    source = spec.source()
    assert source is not None and source.curve is not None
    assert len(source.curve.server) == 40
    with pytest.raises(BadSpec, match="is not a CURVE key file"):
        msgspec.structs.replace(spec, curve_server=str(tmp_path / "nothing")).source()


def test_keys_for_all_replicas_count_where_one_names_none(tmp_path: Path) -> None:
    public, secret = write_keys(str(tmp_path / "replica"))
    named, own = write_keys(str(tmp_path / "named"))
    plain = parse_replica(f"{URL},events=tcp://h:1")
    assert plain.source() != plain.source((str(public), str(secret)))
    spec = parse_replica(f"{URL},events=tcp://h:1,curve_server={named},curve_secret={own}")
    assert spec.source() == spec.source((str(public), str(secret)))
    assert parse_replica(URL).source((str(public), str(secret))) is None


def test_the_key_that_it_is_sent_comes_from_the_environment() -> None:
    spec = parse_replica(f"{URL},api_key_env=MINE")
    assert spec.api_key({"MINE": "k"}, "default") == "k"
    assert parse_replica(URL).api_key({}, "default") == "default"
    with pytest.raises(BadSpec, match=r"api_key_env is 'MINE', which is not set"):
        spec.api_key({})


# ---- answers of a native replica


def test_a_native_replica_says_where_its_sockets_are() -> None:
    spec = with_description(parse_replica(URL), ANSWER)
    assert (spec.engine, spec.model, spec.block_size, spec.max_model_len) == ("warmroute", "m", 16, 4096)
    assert (spec.topic, spec.incarnation) == ("kv@a@m", 7)
    assert spec.events == "tcp://10.0.0.1:5557"
    assert spec.replay == "tcp://10.0.0.1:5558"
    assert spec.status == "tcp://10.0.0.1:5559"
    assert spec.snapshot == "tcp://10.0.0.9:5560"
    source = spec.source()
    assert source is not None and source.native
    spec.check()


def test_what_was_named_before_stays() -> None:
    spec = with_description(parse_replica(f"{URL},max_model_len=100,events=tcp://other:1"), ANSWER)
    assert (spec.max_model_len, spec.events, spec.snapshot) == (100, "tcp://other:1", None)
    assert with_description(parse_replica(f"{URL},events=off"), ANSWER).source() is None


def test_another_model_than_the_named_one_is_refused() -> None:
    with pytest.raises(BadSpec, match=r"serves 'm', not 'other'; correct model"):
        with_description(parse_replica(f"{URL},model=other"), ANSWER)


def test_sockets_on_the_replicas_own_machine_are_not_taken_for_ours() -> None:
    answer = msgspec.structs.replace(ANSWER, endpoints=EventEndpoints("tcp://127.0.0.1:5557"))
    with pytest.raises(BadSpec, match=r"only on its own machine \(tcp://127.0.0.1:5557\); start it with --events-host"):
        with_description(parse_replica(URL), answer)
    assert with_description(parse_replica("http://localhost:1"), answer).events == "tcp://127.0.0.1:5557"
