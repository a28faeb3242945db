"""A chain names the full blocks of a request's tokens, as they grow."""

from typing import Any

import pytest

from events.blocks import ExtraKey, block_keys, root_key
from events.cache.extras import block_extras, chain_salt
from events.messages import BlockStored
from tests.replica.engines import MODEL, SIZE, chain


def test_keys_are_those_that_a_router_works_out_from_the_prompt() -> None:
    tokens = list(range(3 * SIZE + 1))
    own: dict[int, list[ExtraKey]] = {1: [("image", 2)], 2: [b"digest"]}
    one = chain(tokens, lora_name="adapter", cache_salt="salt", extras=own)
    assert one.keys.tolist() == block_keys(tokens, SIZE, root_key(MODEL, "adapter", "salt", SIZE), own)


@pytest.mark.parametrize("extras", [None, {0: [("image", 1)], 2: [b"digest", ("image", 0)]}, {1: []}])
def test_tokens_appended_one_by_one_get_the_keys_of_a_whole_prompt(
    extras: dict[int, list[ExtraKey]] | None,
) -> None:
    tokens = list(range(4 * SIZE + 2))
    for start in range(len(tokens)):
        growing = chain(tokens[:start], extras=extras)
        for token in tokens[start:]:
            growing.append(token)
        assert growing.keys == chain(tokens, extras=extras).keys


def test_every_block_is_named_with_its_parent() -> None:
    one, other = chain([1] * SIZE + [7] * SIZE), chain([2] * SIZE + [7] * SIZE)
    assert one.keys[1] != other.keys[1]


@pytest.mark.parametrize("other", [{"lora_name": "x"}, {"cache_salt": "x"}, {"extras": {0: [("x", 0)]}}])
def test_lora_salt_and_image_each_make_other_names_from_the_first_block_on(other: dict[str, Any]) -> None:
    tokens = list(range(2 * SIZE))
    assert not set(chain(tokens).keys) & set(chain(tokens, **other).keys)


def test_lora_and_salt_of_the_same_text_are_not_confused() -> None:
    tokens = list(range(SIZE))
    names: list[dict[str, Any]] = [
        {"lora_name": "x"},
        {"cache_salt": "x"},
        {"lora_name": "x", "cache_salt": "x"},
        {"extras": {0: [("x", 0)]}},
    ]
    chains = [chain(tokens, **own) for own in names]
    assert len({one.keys[0] for one in chains}) == len(chains)
    assert len({one.exact[0] for one in chains}) == len(chains)


def test_text_before_an_image_stays_shared() -> None:
    tokens = list(range(3 * SIZE))
    plain, pictured = chain(tokens), chain(tokens, extras={1: [("image", 0)]})
    assert plain.keys[0] == pictured.keys[0]
    assert plain.keys[1] != pictured.keys[1]
    assert plain.exact == {}
    assert pictured.exact.keys() == {1}


def test_event_extras_are_read_back_by_any_consumer() -> None:
    own: dict[int, list[ExtraKey]] = {0: [("image", 3)], 2: [b"digest"]}
    one = chain(range(3 * SIZE), lora_name="adapter", cache_salt="salt", extras=own)
    event = BlockStored(
        block_hashes=[*one.keys],
        parent_block_hash=None,
        token_ids=one.tokens,
        block_size=SIZE,
        lora_id=None,
        medium="GPU",
        lora_name="adapter",
        extra_keys=one.event_extras(0, 3),
    )
    assert event.extra_keys == [["adapter", ["image", 3], "salt"], ["adapter"], ["adapter", b"digest"]]
    assert chain_salt(event) == "salt"
    assert block_extras(event) == own
