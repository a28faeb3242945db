"""Pictures stand in the keys of their blocks as engines name them, and no two prompts with other ones share a key."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.blocks import pack_tokens
from events.cache.resolver import Resolver
from events.messages import BlockStored
from router.prompts.pictures import MARK, MAX_BYTES, MAX_CUT_BYTES, MOST, STAND_INS, Cut, Place, cut, placed
from router.prompts.prompt import Prompt, read_peek
from router.prompts.tokenizer_probe import token_ids_in, told_in

TEXT = {"type": "text", "text": "What is this?"}
# An answer of vLLM 0.33.0's /v1/chat/completions/render, asked with mm_payload=none; without its other fields.
RENDERED = (
    b'{"request_id":"chatcmpl-ab58f2dc2e09f94d","token_ids":[1,1560,201,16000,16002,16002,16002,16002,16001,2,201,1],'
    b'"token_offsets":null,"features":{"mm_hashes":{"image":["a842e0a99e2c1d9de43492360eb7f4e81480e53009c8c94d89d25803'
    b'002784bf"]},"mm_placeholders":{"image":[{"offset":4,"length":4}]},"kwargs_data":null,"mm_metadata":null},'
    b'"content_parts":null}'
)
NAME = "a842e0a99e2c1d9de43492360eb7f4e81480e53009c8c94d89d25803002784bf"


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[Place]]:
    ids, places = draw(st.lists(st.integers(0, 9), max_size=9)), list[Place]()
    for name in draw(st.lists(st.sampled_from("abc"), max_size=4)):
        length = draw(st.integers(1, 9))
        places.append((name, len(ids), length))
        ids += [7] * length + draw(st.lists(st.integers(0, 9), max_size=9))
    return ids, places


def extra_keys(places: Sequence[Place], start: int, end: int) -> list[Any] | None:
    """As vLLM publishes them: each picture that the block overlaps, and where it begins from there."""
    return [(name, at - start) for name, at, length in places if at < end and at + length > start] or None


@given(prompts(), st.randoms(use_true_random=False), st.integers(1, 5))
def test_keys_are_those_of_the_events_and_another_picture_has_none_of_them_from_its_block_on(
    made: tuple[list[int], list[Place]], rng: random.Random, size: int
) -> None:
    def keys(pictures: list[Place]) -> list[int]:
        peek = read_peek(b'{"model":"m"}')
        return Prompt("m", 1, [pack_tokens(ids)], True, None, 1, None, None, peek, {}, pictures=pictures).keys(size)

    ids, places = made
    starts, resolver = range(0, len(ids) - size + 1, size), Resolver("m")
    extras = [extra_keys(places, start, start + size) for start in starts]
    stored = ids[: len(starts) * size]
    resolver.apply([BlockStored([*starts], None, stored, size, None, "GPU", None, extra_keys=extras)])
    assert resolver.keys() == set(keys(places))
    for which in rng.sample(range(len(places)), min(1, len(places))):
        others = [*places[:which], ("another", *places[which][1:]), *places[which + 1 :]]
        first = places[which][1] // size
        for other in (keys(others), keys(places[:which])):
            assert keys(places)[:first] == other[:first] and not set(keys(places)[first:]) & set(other)


def test_an_engines_answer_is_read_as_its_tokens_and_a_name_and_nothing_else_is() -> None:
    [(packed, pictures)] = told_in(RENDERED)
    assert packed == pack_tokens([1, 1560, 201, 16000]) + MARK + pack_tokens([16001, 2, 201, 1])
    assert pictures == [[pack_tokens([16002] * 4), NAME.encode()]]
    assert placed([packed], pictures) == ([pack_tokens(json.loads(RENDERED)["token_ids"])], [(NAME, 4, 4)])
    assert placed([packed], []) == placed([packed], [[]]) == placed([pack_tokens([1])], pictures) == ([], [])
    assert token_ids_in(RENDERED) is None, "it has more than tokens"
    for before, after in (
        (b'"length":4', b'"length":9'),
        (b'"length":4', b'"length":0'),
        (b'[{"offset":4,"length":4}]', b"[]"),
    ):
        assert told_in(RENDERED.replace(before, after)) == []
    assert told_in(RENDERED.replace(b"[1,1560", b"[4294967295,1560")) == []


def url(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def body(*parts: Any, api: str = "chat", **more: Any) -> bytes:
    items = "input" if api == "responses" else "messages"
    return json.dumps({"model": "m", items: [{"role": "user", "content": [TEXT, *parts]}], **more}).encode()


@pytest.mark.parametrize(
    ("api", "part"),
    [
        ("chat", url("data:image/png;base64,zzzz")),
        ("chat", {"image_url": "data:image/png;base64,zzzz", "type": "image_url", "uuid": "u"}),
        ("responses", {"type": "input_image", "image_url": "data:image/png;base64,zzzz"}),
        ("messages", {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "zzzz"}}),
    ],
)
def test_pictures_are_cut_out_where_their_data_are(api: str, part: dict[str, Any]) -> None:
    whole = body(part, part, api=api)
    found = cut(api, whole)
    assert found is not None and len(found.pictures) == 2
    assert b"zzzz" not in found.body and found.body.count(STAND_INS[api]) == 2
    [(named, start, end)] = set(found.pictures)
    assert json.loads(whole[start:end]) == part
    other = cut(api, whole.replace(b"zzzz", b"zzzy"))
    assert other is not None and other.body == found.body and other.pictures[0][0] != named


@pytest.mark.parametrize(
    "part",
    [
        url("https://example.com/a.png"),
        url("file:///a.png"),
        {"type": "image_url", "image_url": None, "uuid": "u"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]},
    ],
)
def test_what_an_address_names_proves_no_content(part: dict[str, Any]) -> None:
    assert cut("chat", body(url("data:image/png;base64,zzzz"), part)) is None


def test_few_pictures_are_looked_at_beside_a_bounded_text() -> None:
    assert cut("chat", body(*(url(f"data:,{number}") for number in range(MOST + 1)))) is None
    assert cut("chat", body(url("data:,"), user="a" * MAX_CUT_BYTES)) is None
    assert cut("chat", body(url("data:," + "a" * MAX_BYTES))) is None
    assert cut("completions", b'{"model":"m","prompt":{"type":"image"}}') is None
    assert cut("chat", body()) == Cut(body(), [])
