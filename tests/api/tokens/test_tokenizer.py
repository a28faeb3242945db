import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Tokenizers

from api.tokens.encoder import LONG_TEXT
from api.tokens.pieces import byte_level as byte_level_piece
from api.tokens.pieces import piece_rule
from api.tokens.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer, load_tokenizer
from tests.api.tokenizers import TEXTS, byte_level, saved, sentencepiece


@given(text=st.text(max_size=30))
def test_bytes_survive(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text
    assert tokenizer.special_token_ids.isdisjoint(tokenizer.encode(text, add_special_tokens=False))


def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(byte_level: Tokenizer) -> None:
    for text in TEXTS:
        token_ids = byte_level.encode(text, add_special_tokens=False)
        assert b"".join(map(byte_level.token_bytes, token_ids)).decode() == text


def test_every_id_has_bytes_or_none(tokenizer: Tokenizer) -> None:
    for token_id in (-1, *range(tokenizer.vocab_size + 5), 2**32):
        assert isinstance(tokenizer.token_bytes(token_id), bytes)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.joins_bytes or tokenizer.token_bytes(1)


# ---- what stands in a model's folder


def test_a_folder_and_its_file_are_the_same_tokenizer(tmp_path: Path) -> None:
    saved(byte_level(), tmp_path)
    by_folder, by_file = HfTokenizer(tmp_path), load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert by_folder.encode("fox", add_special_tokens=False) == by_file.encode("fox", add_special_tokens=False)
    assert by_folder.vocab_size == by_file.vocab_size == max(by_folder.special_token_ids) + 3
    assert (by_file.chat_template, by_file.eos_token_ids) == (None, ())


@given(text=st.lists(st.sampled_from(TEXTS) | st.text(max_size=9), min_size=1, max_size=6).map("".join))
def test_a_long_text_has_the_tokens_of_its_encoding_in_one_go(text: str, tokenizer: Tokenizer) -> None:
    if not isinstance(tokenizer, HfTokenizer):
        return
    long = text * (LONG_TEXT // len(text) + 1) if text else ""
    assert tokenizer.encode(long, add_special_tokens=True) == tokenizer._tokenizer.encode(long).ids


@pytest.mark.parametrize("eos", ["<|end|>", {"content": "<|end|>", "lstrip": False}])
def test_the_end_token_is_a_string_or_an_object(tmp_path: Path, eos: Any) -> None:
    tokenizer = HfTokenizer(saved(byte_level(), tmp_path, tokenizer_config={"eos_token": eos, "bos_token": None}))
    assert [tokenizer.token_bytes(i) for i in tokenizer.eos_token_ids] == [b"<|end|>"]
    assert tokenizer.special_tokens == {"eos_token": "<|end|>"}


NO_IDS: list[tuple[Any, tuple[int, ...]]] = [(-1, ()), (10**30, ()), ("x", ()), ([[1], True, 2**31, 2], (2,))]


@pytest.mark.parametrize(("generation", "expected"), [(5, (5,)), ([7, 5, 7], (7, 5)), (None, ()), *NO_IDS])
def test_the_generation_config_names_more_ends(tmp_path: Path, generation: Any, expected: tuple[int, ...]) -> None:
    files = {"tokenizer_config": {"eos_token": "<|end|>"}, "generation_config": {"eos_token_id": generation}}
    tokenizer = HfTokenizer(saved(byte_level(), tmp_path, config={"eos_token_id": 9}, **files))
    assert tokenizer.eos_token_ids[1:] == expected


def test_the_models_config_counts_where_generation_says_nothing(tmp_path: Path) -> None:
    assert HfTokenizer(saved(byte_level(), tmp_path, config={"eos_token_id": 9})).eos_token_ids == (9,)


def test_the_special_tokens_map_counts_unless_the_config_lists_all_tokens(tmp_path: Path) -> None:
    config = {"eos_token": "<|end|>", "image_token": "<|im_start|>"}
    files = {"special_tokens_map": {"eos_token": {"content": "a"}, "bos_token": "b"}, "tokenizer_config": config}
    older = HfTokenizer(saved(byte_level(), tmp_path, **files))
    assert older.special_tokens == {"bos_token": "b", "eos_token": "a", "image_token": "<|im_start|>"}
    assert older.eos_token_ids == tuple(older.encode("a", add_special_tokens=False))
    files["tokenizer_config"] = config | {"added_tokens_decoder": {}}
    assert HfTokenizer(saved(byte_level(), tmp_path, **files)).special_tokens == config


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path) -> None:
    config = {
        "pad_token": "<|pad|>",
        "bos_token": "<|begin|>",
        "additional_special_tokens": [{"content": "<x>"}, "the"],
    }
    plain = byte_level()
    size = plain.get_vocab_size()
    tokenizer = HfTokenizer(saved(plain, tmp_path, tokenizer_config=config))
    ids = tokenizer.encode("<|pad|><x>the", add_special_tokens=False)
    assert ids[:2] == [size, size + 1] and tokenizer.vocab_size == max(size + 2, ids[2] + 1)
    assert tokenizer.special_token_ids.issuperset(ids)


def test_a_template_for_tools_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    saved(byte_level(), tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("b")
    (tmp_path / "chat_template.jinja").write_text("a")
    tokenizer = HfTokenizer(tmp_path)
    assert (tokenizer.chat_template, tokenizer.tool_chat_template) == ("a", "b")


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ("one", ("one", None)),
        ([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}], ("a", "b")),
        ([{"name": "rag", "template": "c"}], (None, None)),
        (None, (None, None)),
    ],
)
def test_a_chat_template_is_one_or_a_list(
    tmp_path: Path, configured: Any, expected: tuple[str | None, str | None]
) -> None:
    tokenizer = HfTokenizer(saved(byte_level(), tmp_path, tokenizer_config={"chat_template": configured}))
    assert (tokenizer.chat_template, tokenizer.tool_chat_template) == expected


def test_a_chat_template_in_its_own_file_wins(tmp_path: Path) -> None:
    files = {"tokenizer_config": {"chat_template": "a"}, "chat_template": {"chat_template": "b"}}
    assert HfTokenizer(saved(byte_level(), tmp_path, **files)).chat_template == "b"
    (tmp_path / "chat_template.jinja").write_text("c é")
    assert HfTokenizer(tmp_path).chat_template == "c é"


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "holds a list; it must be an object")],
)
def test_a_broken_file_is_named(tmp_path: Path, content: str, says: str) -> None:
    saved(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=f"tokenizer_config.json {says}"):
        HfTokenizer(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.json does not exist; name a tokenizer.json"):
        load_tokenizer(tmp_path)


# ---- decoders


def decoder(tokenizer: Tokenizers) -> Any:
    return json.loads(tokenizer.to_str())["decoder"]


def test_bytes_of_the_byte_level_alphabet() -> None:
    assert byte_level_piece("ĠHello") == b" Hello"
    assert byte_level_piece("ðŁĺĢ") == "😀".encode()
    assert byte_level_piece("a b") == b"a b"


def test_bytes_of_a_sentencepiece_vocabulary() -> None:
    rule = piece_rule(decoder(sentencepiece()))
    assert rule is not None
    pieces = {"▁the": b" the", "<0xE6>": b"\xe6", "<0xZZ>": b"<0xZZ>", "<0x+1>": b"<0x+1>", "東": "東".encode()}
    assert {token: rule(token) for token in pieces} == pieces


@pytest.mark.parametrize(
    "unknown",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Sequence", "decoders": []},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "CTC"}]},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}, {"type": "Fuse"}]},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
    ],
)
def test_a_decoder_that_looks_around_has_no_bytes_by_token(unknown: Any) -> None:
    assert piece_rule(unknown) is None


def test_a_file_that_is_no_tokenizer_or_template_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"/tokenizer\.json is not a tokenizer"):
        HfTokenizer(tmp_path)
    saved(byte_level(), tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"/chat_template\.jinja is not a chat template: it is not UTF-8"):
        HfTokenizer(tmp_path)
