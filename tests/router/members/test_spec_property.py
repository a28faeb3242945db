"""A written spec is read back unchanged; any text is a valid spec or raises BadSpec."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.members.spec import BadSpec, ReplicaSpec, parse_replica

WORDS = st.text("abcXYZ019_.-", min_size=1, max_size=12)
NAMES = WORDS.filter(lambda name: name not in (".", ".."))  # these have another meaning in a path
PORTS = st.integers(1, 65535)
ENDPOINTS = st.builds(lambda host, port: f"tcp://{host}:{port}", st.from_regex(r"[a-z]{1,8}", fullmatch=True), PORTS)


@st.composite
def specs(draw: st.DrawFn) -> ReplicaSpec:
    fields: dict[str, Any] = {
        "name": draw(NAMES),
        "url": f"{draw(st.sampled_from(['http', 'https']))}://{draw(st.from_regex(r'[a-z]{1,8}', fullmatch=True))}:"
        f"{draw(PORTS)}",
        "engine": draw(st.sampled_from(["auto", "warmroute", "vllm", "sglang", "openai"])),
        "model": draw(st.none() | st.text("abc/=- é", min_size=1)),
        "adapters": tuple(draw(st.lists(WORDS, max_size=2))),
        "block_size": draw(st.none() | st.integers(1, 2**31 - 1)),
        "resume": draw(st.booleans()),
    }
    if draw(st.booleans()):
        fields |= {"events": draw(ENDPOINTS), "replay": draw(st.none() | ENDPOINTS)}
    return ReplicaSpec(**fields)


def text_of(spec: ReplicaSpec) -> str:
    fields = msgspec.to_builtins(spec)
    adapters = [f"adapter={name}" for name in fields.pop("adapters", ())]
    pairs = [f"{key}={str(value).lower() if value is True else value}" for key, value in fields.items()]
    return ",".join([*pairs, *adapters])


@given(specs())
def test_a_spec_is_read_as_it_was_written(spec: ReplicaSpec) -> None:
    assert parse_replica(text_of(spec)) == spec


@given(st.text("http:/[]@=,uralnmeodgi0189. \0é", max_size=60) | st.text())
def test_any_text_is_a_spec_or_refused(text: str) -> None:
    for candidate in (text, f"url=http://h:1,{text}", f"http://{text}"):
        try:
            spec = parse_replica(candidate)
        except BadSpec:
            continue
        spec.check()
        assert spec.target.host
