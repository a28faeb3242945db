import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from api.tokens.tokenizer import Tokenizer
from events.blocks import pack_tokens
from router.prompts.piece_cache import PieceCache, best_cut
from tests.router.families import prompts

CUT = "<|im_start|>"


@pytest.fixture
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return prompts("qwen", tmp_path_factory.getbasetemp()).tokenizer


def conversation(*messages: str) -> str:
    return "".join(f"{CUT}user\n{message}<|im_end|>\n" for message in messages)


def whole(tokenizer: Tokenizer, text: str) -> bytes:
    return pack_tokens(tokenizer.encode(text, add_special_tokens=False))


def test_only_what_is_new_is_encoded(tokenizer: Tokenizer) -> None:
    cache = PieceCache(tokenizer, CUT, 100_000)
    first, second = conversation("one", "two"), conversation("one", "two", "three")
    assert cache.encode(cache.look_up(first)) == whole(tokenizer, first)
    found = cache.look_up(second)
    assert [ids is None for ids in found.ids] == [False, False, True]
    assert 0 < found.unknown_bytes < len(conversation("three"))
    assert cache.encode(found) == whole(tokenizer, second)
    assert cache.look_up(second).unknown_bytes == 0


def test_a_text_before_the_first_cut_is_another_one_than_after_it(tokenizer: Tokenizer) -> None:
    cache = PieceCache(tokenizer, CUT, 100_000)
    for text in ("user", f"{CUT}user", f"user{CUT}user", CUT, "", f"{CUT}{CUT}"):
        assert cache.encode(cache.look_up(text)) == whole(tokenizer, text), text


def test_the_least_recently_used_is_forgotten_within_the_bytes(tokenizer: Tokenizer) -> None:
    cache = PieceCache(tokenizer, CUT, 20_000)
    for i in range(500):
        for text in (conversation("always used"), conversation(f"message {i}")):
            cache.encode(cache.look_up(text))
            cache.check()
    assert cache.look_up(conversation("always used")).unknown_bytes == 0
    assert cache.look_up(conversation("message 499")).unknown_bytes == 0
    assert cache.look_up(conversation("message 0")).unknown_bytes > 0
    assert 10 < len(cache) < 100


def test_the_bytes_are_those_of_the_process(tokenizer: Tokenizer) -> None:
    texts = [conversation("word " * (i % 40) + str(i)) for i in range(6000)]
    cache = PieceCache(tokenizer, CUT, 1_000_000)
    tracemalloc.start()
    try:
        for text in texts:
            cache.encode(cache.look_up(text))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.9 * cache.capacity_bytes < cache.used_bytes <= cache.capacity_bytes
    assert 0.8 * taken < cache.used_bytes < 1.25 * taken


def test_a_giant_piece_does_not_push_out_the_others(tokenizer: Tokenizer) -> None:
    cache = PieceCache(tokenizer, CUT, 20_000)
    cache.encode(cache.look_up(conversation("small")))
    giant = conversation("x" * 30_000)
    assert cache.encode(cache.look_up(giant)) == whole(tokenizer, giant)
    assert len(cache) == 1 and cache.look_up(giant).unknown_bytes > 0
    cache.check()


def test_an_entry_that_goes_between_looking_and_encoding_is_no_loss(tokenizer: Tokenizer) -> None:
    cache = PieceCache(tokenizer, CUT, 20_000)
    text = conversation("one", "two")
    cache.encode(cache.look_up(text))
    found = cache.look_up(text)
    cache.clear()
    cache.check()
    assert cache.encode(found) == whole(tokenizer, text) and len(cache) == 0


def test_threads_share_a_cache(tokenizer: Tokenizer) -> None:
    cache = PieceCache(tokenizer, CUT, 4_000)
    texts = [conversation(f"{i % 7}", f"{i % 11}", f"{i % 13}") for i in range(200)]
    expected = [whole(tokenizer, text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda text: cache.encode(cache.look_up(text)), texts)) == expected
    cache.check()


def test_the_cut_is_where_only_the_new_turn_is_new() -> None:
    for text, cut in (
        ("<i>user a<e> <i>assistant b<e> <i>user c<e> <i>assistant", "<i>"),  # one more beginning than ends
        ("<s>[INST] a [/INST] b</s>[INST] c [/INST]", "[/INST]"),  # as many of both: the last
        ("no token at all", None),
    ):
        assert best_cut(["<i>", "<e>", "<s>", "</s>", "[INST]", "[/INST]"], text) == cut
