"""A text in pieces has the tokens of the whole, for every tokenizer and however nasty the text."""

from pathlib import Path

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from api.tokens.tokenizer import HfTokenizer
from events.blocks import pack_tokens
from router.prompts.piece_cache import PieceCache, difference, tries
from tests.api.tokenizers import TEXTS, saved

FLAGS = st.fixed_dictionaries(
    {"special": st.booleans()},
    optional={name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized")},
)
CONTENTS = ["<a>", "<b>", "<a", "a>", "<a><b>", "_x_", "xx", "::", ":", " y", "é", "<É>", "東", "\n\n"]


def texts_of(fragments: list[str]) -> st.SearchStrategy[str]:
    part = st.sampled_from(fragments) | st.sampled_from(TEXTS) | st.text(max_size=4)
    return st.lists(part, max_size=12).map("".join)


def in_pieces(cache: PieceCache, text: str) -> bytes:
    return cache.encode(cache.look_up(text))


NORMALIZERS = {
    "none": None,
    "prepend": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "nfkc": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    "strip": normalizers.Strip(),
}
PRE_TOKENIZERS = {
    "none": None,
    "first": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "always": pre_tokenizers.Metaspace(prepend_scheme="always", split=False),
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "words": pre_tokenizers.BertPreTokenizer(),
}


def tokenizer_of(
    folder: Path, added: list[tuple[str, dict[str, bool]]], normalizer: str, pre_tokenizer: str
) -> HfTokenizer:
    known = sorted({*pre_tokenizers.ByteLevel.alphabet(), *"▁abcdefghijklmnopqrstuvwxyz<>|:_ \n", "é", "東"})
    vocab = {token: i for i, token in enumerate(["<unk>", *known, "▁a", "Ġa", "ab", "<a", "a>"])}
    merges = [("▁", "a"), ("Ġ", "a"), ("a", "b"), ("<", "a"), ("a", ">")]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True))
    if NORMALIZERS[normalizer] is not None:
        made.normalizer = NORMALIZERS[normalizer]
    if PRE_TOKENIZERS[pre_tokenizer] is not None:
        made.pre_tokenizer = PRE_TOKENIZERS[pre_tokenizer]
    made.add_tokens([AddedToken(content, **flags) for content, flags in added])
    return HfTokenizer(saved(made, folder))


@given(
    added=st.lists(st.tuples(st.sampled_from(CONTENTS), FLAGS), max_size=5, unique_by=lambda token: token[0]),
    normalizer=st.sampled_from([*NORMALIZERS]),
    pre_tokenizer=st.sampled_from([*PRE_TOKENIZERS]),
    data=st.data(),
)
def test_pieces_are_the_whole_whatever_tokens_are_added(
    tmp_path_factory: pytest.TempPathFactory,
    added: list[tuple[str, dict[str, bool]]],
    normalizer: str,
    pre_tokenizer: str,
    data: st.DataObject,
) -> None:
    # A token of which the normalizer leaves nothing makes `tokenizers` panic at any text.
    assume(normalizer != "strip" or all(content.strip() for content, _ in added))
    tokenizer = tokenizer_of(tmp_path_factory.mktemp("t"), added, normalizer, pre_tokenizer)
    event(f"{len(tokenizer.cuts)} cuts")
    for cut in tokenizer.cuts:
        text = data.draw(texts_of([*CONTENTS, cut, cut, " ", "\n", "a", "b c", "É"]))
        whole = pack_tokens(tokenizer.encode(text, add_special_tokens=False))
        assert in_pieces(PieceCache(tokenizer, cut, 10_000), text) == whole


UNSAFE = {
    "takes the space before it": ("<a>", {"lstrip": True}),
    "is taken out after normalizing": ("<a>", {"normalized": True}),
    "begins inside another one": ("a>", {}),
    "asks what stands beside it": ("<a", {"single_word": True}),
}


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_the_rule_leaves_out_what_a_check_would_find(tmp_path: Path, unsafe: str) -> None:
    """The negative control: with the rule overridden, pieces differ, and the check at the start sees it."""
    content, flags = UNSAFE[unsafe]
    others: list[tuple[str, dict[str, bool]]] = [("<a>", {})] if unsafe == "begins inside another one" else []
    if unsafe == "asks what stands beside it":
        content = "aa"
    tokenizer = tokenizer_of(tmp_path, [(content, flags), *others], "prepend", "none")
    assert content not in tokenizer.cuts
    assert difference(tokenizer, content, tries(content, ["b a>", "baa aab"], ["<a>"])) is not None
