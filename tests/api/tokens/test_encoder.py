import json
import logging
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from api.tokens.encoder import COMPARE_EVERY, DIFFERS, LONG_TEXT, Encoder
from tests.api.splits import STYLES
from tests.api.trained import FAMILIES, TEXT

IS_THOROUGH = settings().max_examples > 15
FAST = ("gpt2", "llama3", "qwen")
DIFFERENT = ("llama2",)  # in a text that spells a byte as the vocabulary does: <0x0A>
SPECIALS = ("<|im_start|>", "<|eot_id|>", "<|endoftext|>", "<s>", "</s>", "<think>", "[INST]", "<|im_", "<unk>")
# All but the large blocks whose characters are alike, of which the ends must do.
RANGES = ((0, 0x3410), (0x9FF0, 0xAC10), (0xD790, 0xD800), (0xF8F0, 0x17010), (0x18CF0, 0x1F000), (0x1FFF0, 0x20010))
CODE_POINTS = [point for start, end in RANGES for point in range(start, end)]
AT_ONCE = 4096  # code points in one text

texts = st.lists(st.text(max_size=12) | st.sampled_from([*TEXT, *SPECIALS, "\r\n", "  ", "\u00a0", "'LL"]), max_size=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def made(folder: Path, family: str) -> tuple[Tokenizer, Encoder]:
    tokenizer, file = FAMILIES[family](), folder / f"{family}.json"
    tokenizer.save(str(file))
    return tokenizer, Encoder(tokenizer, file)


def assert_as_tokenizers(tokenizer: Tokenizer, encoder: Encoder, text: str) -> None:
    for special in (False, True):
        right = tokenizer.encode(text, add_special_tokens=special).ids
        assert encoder.encode(text, add_special_tokens=special) == right


@pytest.mark.parametrize("family", FAMILIES)
def test_these_families_are_encoded_fast(folder: Path, family: str) -> None:
    _, encoder = made(folder, family)
    assert encoder.is_fast == (family in FAST), encoder.why_not_fast
    assert (encoder.why_not_fast == DIFFERS) == (family in DIFFERENT)
    assert encoder.is_fast or family in DIFFERENT or "unsupported" in str(encoder.why_not_fast)


@pytest.mark.parametrize("family", FAMILIES)
@given(parts=texts)
def test_texts_have_the_tokens_that_tokenizers_gives(folder: Path, family: str, parts: list[str]) -> None:
    assert_as_tokenizers(*made(folder, family), "".join(parts))


@pytest.mark.parametrize("family", FAST if IS_THOROUGH else ["llama3"])
@given(parts=texts.filter(any), length=st.sampled_from([LONG_TEXT, 9 * LONG_TEXT]))
def test_long_texts_too(folder: Path, family: str, parts: list[str], length: int) -> None:
    text = "".join(parts)
    assert_as_tokenizers(*made(folder, family), text * (length // len(text) + 1))


@pytest.mark.parametrize("style", STYLES if IS_THOROUGH else ["gpt2"])  # each takes a second to make
@given(parts=texts)
def test_texts_are_split_as_tokenizers_splits_them(folder: Path, style: str, parts: list[str]) -> None:
    assert_as_tokenizers(*splitting(folder, style), "".join(parts))


@pytest.mark.grid
@pytest.mark.parametrize("style", STYLES)
def test_every_character_is_of_the_same_kind(folder: Path, style: str) -> None:
    """Both know Unicode by tables of their own, which may be of different years."""
    tokenizer, encoder = splitting(folder, style)
    for start in range(0, len(CODE_POINTS), AT_ONCE):
        text = "".join(f"a{c}1 {c}!" for c in map(chr, CODE_POINTS[start : start + AT_ONCE]))
        right = tokenizer.encode(text, add_special_tokens=False).ids
        assert encoder.encode(text, add_special_tokens=False) == right


@cache
def splitting(folder: Path, style: str) -> tuple[Tokenizer, Encoder]:
    """A tokenizer that splits texts in this style. Any two bytes merge, so that the tokens show where it does."""
    tokenizer, file = every_two_bytes_merge(), folder / f"{style}-splits.json"
    tokenizer.pre_tokenizer = STYLES[style]
    tokenizer.save(str(file))
    encoder = Encoder(tokenizer, file)
    assert encoder.is_fast, encoder.why_not_fast
    return tokenizer, encoder


def every_two_bytes_merge() -> Tokenizer:
    alphabet = sorted(ByteLevel.alphabet())
    merges = list(product(alphabet, alphabet))
    return Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}, merges))


def test_threads_may_share_an_encoder(folder: Path) -> None:
    tokenizer, encoder = made(folder, "qwen")
    many = [text * times for times in (1, 3, 400) for text in TEXT]
    alone = [tokenizer.encode(text, add_special_tokens=False).ids for text in many]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda text: encoder.encode(text, add_special_tokens=False), many * 4)
    assert list(found) == alone * 4


def test_a_text_that_is_none_is_an_error_as_before_and_changes_nothing(folder: Path) -> None:
    _, encoder = made(folder, "gpt2")
    with pytest.raises(TypeError):
        encoder.encode("half a pair: \ud800", add_special_tokens=False)
    assert encoder.is_fast


def test_special_tokens_that_only_other_files_name_are_known(tmp_path: Path) -> None:
    tokenizer, file = FAMILIES["qwen"](), tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    tokenizer.add_special_tokens(["<|pad|>", "<x>"])
    encoder = Encoder(tokenizer, file, ["<|pad|>", "<x>"])
    assert encoder.is_fast
    assert_as_tokenizers(tokenizer, encoder, "a<x>b <|pad|> c")


def test_truncation_in_the_file_is_not_applied(tmp_path: Path) -> None:
    tokenizer, file = FAMILIES["qwen"](), tmp_path / "tokenizer.json"
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoder = Encoder(tokenizer, file)
    assert encoder.is_fast
    assert_as_tokenizers(tokenizer, encoder, TEXT[0])


@pytest.mark.grid
def test_words_that_nobody_repeats_take_bounded_memory(folder: Path) -> None:
    made(folder, "qwen")
    ran = subprocess.run(
        [sys.executable, "-c", RANDOM_WORDS, str(folder / "qwen.json")], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) < 200, ran.stdout


RANDOM_WORDS = """
import random, resource, sys
from pathlib import Path
from tokenizers import Tokenizer
from api.tokens.encoder import Encoder
file, chance = Path(sys.argv[1]), random.Random(1)
encoder = Encoder(Tokenizer.from_file(str(file)), file)
encoder.encode("warm", add_special_tokens=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(20_000):
    letters = chance.randbytes(1000).hex()
    encoder.encode(" ".join(letters[i : i + 7] for i in range(0, 2000, 7)), add_special_tokens=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


# ---- what differs is not used


@pytest.fixture
def other(tmp_path: Path) -> tuple[Tokenizer, Path]:
    """A tokenizer, and the file of one with another merge."""
    tokenizer, file = FAMILIES["gpt2"](), tmp_path / "tokenizer.json"
    content = json.loads(tokenizer.to_str())
    del content["model"]["merges"][3]
    file.write_text(json.dumps(content))
    return tokenizer, file


def test_a_difference_is_found_at_the_start(other: tuple[Tokenizer, Path], caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, file = other
    with caplog.at_level(logging.INFO):
        encoder = Encoder(tokenizer, file)
    assert not encoder.is_fast
    assert caplog.messages == [f"{file}: encoding by tokenizers: {DIFFERS}"]
    assert_right(tokenizer, encoder)


def few_bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return tokenizer


def endless_pattern() -> Tokenizer:
    """Its pattern tries every division of a text."""
    tokenizer = every_two_bytes_merge()
    tokenizer.pre_tokenizer = Sequence([Split(Regex(r"(?:\s*\S*)*x"), "isolated"), STYLES["gpt2"]])
    return tokenizer


@pytest.mark.parametrize(("make", "why"), [(few_bytes, "has no token"), (endless_pattern, "match limit exceeded")])
def test_what_fastokens_fails_at_is_left_to_tokenizers(tmp_path: Path, make: Callable[[], Tokenizer], why: str) -> None:
    tokenizer, file = make(), tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    encoder = Encoder(tokenizer, file)
    assert why in str(encoder.why_not_fast)
    assert encoder.encode("a b", add_special_tokens=False) == tokenizer.encode("a b", add_special_tokens=False).ids


def test_a_difference_is_found_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A word that only the file takes for one token, and that nobody would try at the start."""
    tokenizer, file = FAMILIES["gpt2"](), tmp_path / "tokenizer.json"
    changed = FAMILIES["gpt2"]()
    changed.add_tokens([AddedToken("zyxwv", normalized=False)])
    changed.save(str(file))
    encoder = Encoder(tokenizer, file)
    assert encoder.is_fast
    right = tokenizer.encode("a zyxwv", add_special_tokens=False).ids
    found = [encoder.encode("a zyxwv", add_special_tokens=False) for _ in range(COMPARE_EVERY)]
    assert found[-1] == right
    assert found[0] != right
    assert encoder.why_not_fast == DIFFERS
    assert "in one of 7 characters" in caplog.text
    assert "zyxwv" not in caplog.text
    assert_right(tokenizer, encoder)


def assert_right(tokenizer: Tokenizer, encoder: Encoder) -> None:
    for text in TEXT:
        right = tokenizer.encode(text, add_special_tokens=True).ids
        assert encoder.encode(text, add_special_tokens=True) == right
