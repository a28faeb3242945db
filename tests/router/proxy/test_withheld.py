"""Fields that name hosts, ranks and sockets to an engine: clients may not set them, however they are spelled."""

import json
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from router.proxy.withheld import NESTING, PLACING, PRIORITY, TRANSFER, withhold
from tests.router.scripted import MODEL, Scripted, connect, says, served

PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 22}
WITHHELD = (*TRANSFER, *PLACING)
SPELLINGS = [
    b'"kv_transfer_params"',
    b'"ec_transfer_params"',
    b'"bootstrap_host"',
    b'"http_worker_ipc"',
    b'"kv\\u005ftransfer_params"',
    b'"\\u006bv_transfer_params"',
]


def without(body: bytes, names: Collection[str] = WITHHELD) -> bytes:
    return withhold(body, names)[0]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_however_it_is_spelled(spelling: bytes) -> None:
    body = b'{"model":"m",%b:%b,"n":1.50,%b:null}' % (spelling, json.dumps(PARAMS).encode(), spelling)
    assert without(body) == b'{"model":"m","n":1.50}'


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"vllm_xargs":{"%b":"x","k":1.0},"n":1}', b'{"vllm_xargs":{"k":1.0},"n":1}'),
        (b'{"sampling_params":{"extra_args":{"%b":{}},"n":1}}', b'{"sampling_params":{"extra_args":{},"n":1}}'),
    ],
)
@pytest.mark.parametrize("spelling", [b"kv_transfer_params", b"ec_transfer\\u005fparams"])
def test_where_vllm_looks_for_it_too(body: bytes, left: bytes, spelling: bytes) -> None:
    assert without(body % spelling) == left
    assert without(body % spelling, PLACING) == body % spelling, "with pass_kv_transfer_params"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m",  "n": 1}',
        b'{"messages": [{"content": "what are kv_transfer_params?"}]}',
        b'{"messages": [{"content": "\\u00fcber"}]}',
        b'{"other": {"kv_transfer_params": 1}}',
        b'{"vllm_xargs": {"other": 1}, "sampling_params": "kv_transfer_params", "extra_args": [{}]}',
    ],
)
def test_other_bodies_stay_as_they_are(body: bytes) -> None:
    assert without(body) == body


def test_a_priority_only_where_it_is_asked_for() -> None:
    body = b'{"model":"m","priority":-5,"service_tier":"priority"}'
    assert without(body) == body
    assert without(body, (*WITHHELD, PRIORITY)) == b'{"model":"m","service_tier":"priority"}'
    escaped = b'{"model":"m","\\u0070riority":"-5"}'
    assert withhold(escaped, (PRIORITY,))[2] == -5
    assert without(escaped, (PRIORITY,)) == b'{"model":"m"}'
    assert without(escaped, ()) == escaped


values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)


@given(st.dictionaries(st.sampled_from([*WITHHELD, "model", "über", "kv"]) | st.text(), values), st.booleans())
def test_all_else_is_kept(fields: dict[str, Any], ascii_only: bool) -> None:
    kept = json.loads(without(json.dumps(fields, ensure_ascii=ascii_only).encode()))
    assert kept == {name: value for name, value in fields.items() if name not in WITHHELD}


# ---- what an engine's parser makes of what is left

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
odd = st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", '"\\ud83d"', '"\\u0000"', "01", "1" * 5000, "[" * 90])
scalars = odd | st.sampled_from(["null", "1", '"x"', "{}", "[]", '{"kv_transfer_params": 1}'])


@st.composite
def spelled(draw: st.DrawFn, name: str) -> str:
    """The name as a JSON string, any of its characters escaped."""
    written = "".join(
        f"\\u{ord(each):04{draw(st.sampled_from('xX'))}}" if draw(st.booleans()) else each for each in name
    )
    return f'"{written}"'


@st.composite
def objects(draw: st.DrawFn, depth: int = 2) -> str:
    """An object with withheld fields here and there, in any order, some of them twice, and with odd values."""
    names = draw(st.lists(st.sampled_from([*WITHHELD, *NESTING, "model", "n", PRIORITY]), min_size=1, max_size=6))
    space = st.sampled_from(["", " ", "\n", "\t"])
    pairs = [
        draw(space)
        + draw(spelled(name))
        + draw(space)
        + ":"
        + draw(space)
        + draw(scalars | objects(depth - 1) if depth and name in NESTING else scalars)
        for name in names
    ]
    return "{" + ",".join(pairs) + draw(st.sampled_from(["}", "}", "}", "} ", "}x", ""]))


@given(objects(), st.sampled_from(ENCODINGS), st.sampled_from(["", "\ufeff", " ", "\x00"]))
def test_no_engine_finds_a_withheld_field_in_what_is_passed_on(text: str, encoding: str, before: str) -> None:
    """Python's parser takes the most of all that engines use: it detects encodings, and accepts NaN."""
    try:
        passed_on = without((before + text).encode(encoding, "surrogatepass"), (*WITHHELD, PRIORITY))
    except ApiError:
        return  # 400
    try:
        read = json.loads(passed_on)
    except ValueError:
        return  # the engine refuses it
    assert {*WITHHELD, PRIORITY}.isdisjoint(read)
    assert set(TRANSFER).isdisjoint(within(read, "vllm_xargs"))
    assert set(TRANSFER).isdisjoint(within(within(read, "sampling_params"), "extra_args"))


def within(fields: dict[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


# ---- through a router

PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
    "/inference/v1/generate",
    "/tokenize",
]


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize(("path", "size"), [*((path, 1) for path in PATHS), (PATHS[0], 400_000), (PATHS[2], 400_000)])
async def test_on_every_route_that_generates(path: str, size: int, passes: bool) -> None:
    one = Scripted("one", says())
    body: dict[str, Any] = {"model": MODEL, "prompt": "x" * size, "messages": [{"role": "user", "content": "x" * size}]}
    body |= {"kv_transfer_params": PARAMS, "vllm_xargs": {"kv_transfer_params": "x"}, "routed_dp_rank": 1, "last": 1}
    async with served(one, pass_kv_transfer_params=passes) as running, connect(running.port) as client:
        assert (await client.post(path, body)).status == 200
    sent = one.calls[0].json
    assert sent.get("kv_transfer_params") == (PARAMS if passes else None)
    assert sent["vllm_xargs"] == ({"kv_transfer_params": "x"} if passes else {})
    assert "routed_dp_rank" not in sent and sent["last"] == 1
