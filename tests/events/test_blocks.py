"""Block keys: one name for a prefix, from tokens alone."""

from array import array
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from events.blocks import ExtraKey, block_keys, extend_keys, pack_tokens, root_key

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
BLOCK_SIZES = st.integers(1, 9)
EXTRA_KEYS: st.SearchStrategy[ExtraKey] = st.tuples(st.text(max_size=5), st.integers(-9, 9)) | st.binary(max_size=5)
EXTRAS = st.dictionaries(st.integers(0, 5), st.lists(EXTRA_KEYS, min_size=1, max_size=3), max_size=3)

# From the first version; another value means that replicas and routers of different versions disagree.
ROOT_OF_ALL_VERSIONS = 3645809303347877604
KEYS_OF_ALL_VERSIONS = [13500752977579101675, 2202224638087137593]


def test_key_is_the_hash_of_little_endian_tokens_seeded_with_the_parents_key() -> None:
    root = root_key("model", None, None, 2)
    first = xxh3_64_intdigest(bytes.fromhex("01000000 02000000"), root)
    second = xxh3_64_intdigest(bytes.fromhex("ffffffff 00000100"), first)
    assert block_keys([1, 2, 2**32 - 1, 65536], 2, root) == [first, second]


def test_keys_are_what_they_were_in_every_version() -> None:
    root = root_key("model", "adapter", "tenant", 2)
    assert root == ROOT_OF_ALL_VERSIONS
    assert block_keys([1, 2, 3, 4], 2, root, {1: [("image", 7), b"embedding"]}) == KEYS_OF_ALL_VERSIONS


@given(TOKENS, BLOCK_SIZES, EXTRAS)
def test_packed_tokens_have_the_keys_of_the_list(
    tokens: list[int], block_size: int, extras: dict[int, list[ExtraKey]]
) -> None:
    packed = pack_tokens(tokens)
    keys = block_keys(tokens, block_size, 1, extras)
    assert all(
        block_keys(kind, block_size, 1, extras) == keys for kind in (packed, bytearray(packed), memoryview(packed))
    )


@given(TOKENS, BLOCK_SIZES, EXTRAS, st.data())
def test_keys_extended_in_pieces_are_those_of_the_whole(
    tokens: list[int], block_size: int, extras: dict[int, list[ExtraKey]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(tokens) // block_size))
    head, tail = pack_tokens(tokens[: cut * block_size]), pack_tokens(tokens[cut * block_size :])
    keys = extend_keys(1, head, block_size, extras)
    later = {index - cut: own for index, own in extras.items() if index >= cut}
    keys += extend_keys(keys[-1] if keys else 1, tail, block_size, later)
    assert keys == block_keys(tokens, block_size, 1, extras)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), BLOCK_SIZES, st.data())
def test_other_token_changes_the_keys_from_its_block_on(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = block_keys(tokens, block_size, 1), block_keys(other, block_size, 1)
    assert common_prefix(before, after) == min(at // block_size, len(before))
    assert set(before[at // block_size :]).isdisjoint(after)


@given(st.integers(0, 3), EXTRA_KEYS, EXTRA_KEYS)
def test_text_before_an_image_is_shared_by_requests_with_different_images(
    block: int, image: ExtraKey, other: ExtraKey
) -> None:
    tokens = [5] * 8
    plain = block_keys(tokens, 2, 1)
    with_image = block_keys(tokens, 2, 1, {block: [image]})
    with_other = block_keys(tokens, 2, 1, {block: [other]})
    assert common_prefix(plain, with_image) == block
    assert common_prefix(with_image, with_other) == (4 if image == other else block)


def test_same_image_elsewhere_in_its_block_has_another_key() -> None:
    images: list[list[ExtraKey]] = [[("a", 0)], [("a", 1)], [("b", 0)], [("a", 0), ("b", 0)], [b"a"]]
    assert len({block_keys([1], 1, 1, {0: own})[0] for own in images}) == len(images)


def test_prompts_of_different_roots_share_no_key() -> None:
    roots = [
        root_key(model, lora, salt, block_size)
        for model, lora, salt, block_size in product("ab", (None, "", "x"), (None, "", "x"), (1, 2))
    ]
    keys = [key for root in roots for key in block_keys([1, 1], 1, root)]
    assert len(set(roots)) == len(roots)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("block_size", [0, -1])
def test_impossible_block_size_is_named(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}; it must be at least 1"):
        block_keys([1], block_size, 1)


@pytest.mark.parametrize("bad", [-1, 2**32, 2**64, "x", 1.5, None])
def test_impossible_token_is_named_with_its_place(bad: object) -> None:
    with pytest.raises(ValueError, match=rf"token 1 is {bad!r}; a token id is an integer from 0 to"):
        pack_tokens([7, bad, 9])  # type: ignore[list-item]


def common_prefix(one: list[int], other: list[int]) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


@given(TOKENS)
def test_tokens_in_an_array_pack_as_those_in_a_list(tokens: list[int]) -> None:
    assert pack_tokens(array("I", tokens)) == pack_tokens(tokens)
