"""Fields that name hosts to an engine: clients may not set them, however they are spelled, on any route."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from router.proxy.withheld import PRIORITY, WITHHELD, without_withheld
from tests.router.scripted import MODEL, Scripted, connect, says, served

PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 22}
SPELLINGS = [
    b'"kv_transfer_params"',
    b'"ec_transfer_params"',
    b'"kv\\u005ftransfer_params"',
    b'"\\u006bv_transfer_params"',
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_however_it_is_spelled(spelling: bytes) -> None:
    body = b'{"model":"m",%b:%b,"n":1.50,%b:null}' % (spelling, json.dumps(PARAMS).encode(), spelling)
    assert without_withheld(body) == b'{"model":"m","n":1.50}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m",  "n": 1}',
        b'{"messages": [{"content": "what are kv_transfer_params?"}]}',
        b'{"messages": [{"content": "\\u00fcber"}]}',
        b'{"other": {"kv_transfer_params": 1}}',
        b"--boundary kv_transfer_params",
        b"",
    ],
)
def test_other_bodies_stay_as_they_are(body: bytes) -> None:
    assert without_withheld(body) == body


@pytest.mark.parametrize("body", [b' {"kv_transfer_params": NaN}', b'{"kv_transfer_params": 1'])
def test_a_body_that_only_a_lenient_engine_can_read_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="kv_transfer_params, which only the router may") as raised:
        without_withheld(body)
    assert raised.value.status == 400


def test_a_priority_only_where_it_is_asked_for() -> None:
    body = b'{"model":"m","priority":-5,"service_tier":"priority"}'
    assert without_withheld(body) == body
    assert without_withheld(body, (*WITHHELD, PRIORITY)) == b'{"model":"m","service_tier":"priority"}'
    escaped = b'{"model":"m","\\u0070riority":-5}'
    assert without_withheld(escaped, (PRIORITY,)) == b'{"model":"m"}'
    assert without_withheld(escaped, ()) == escaped


values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)


@given(st.dictionaries(st.sampled_from([*WITHHELD, "model", "über", "kv"]) | st.text(), values), st.booleans())
def test_all_else_is_kept(fields: dict[str, Any], ascii_only: bool) -> None:
    kept = json.loads(without_withheld(json.dumps(fields, ensure_ascii=ascii_only).encode()))
    assert kept == {name: value for name, value in fields.items() if name not in WITHHELD}


PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/chat/completions/batch",
    "/v1/embeddings",
    "/inference/v1/generate",
]


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("size", [1, 400_000], ids=["small", "large"])
@pytest.mark.parametrize("path", PATHS)
async def test_on_every_route_that_generates(path: str, size: int, passes: bool) -> None:
    one = Scripted("one", says())
    body: dict[str, Any] = {"model": MODEL, "prompt": "x" * size, "messages": [{"role": "user", "content": "x" * size}]}
    body |= {"kv_transfer_params": PARAMS, "last": 1}
    async with served(one, pass_kv_transfer_params=passes) as running, connect(running.port) as client:
        assert (await client.post(path, body)).status == 200
    assert one.calls[0].json.get("kv_transfer_params") == (PARAMS if passes else None)
    assert one.calls[0].json["last"] == 1
