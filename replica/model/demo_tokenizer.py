"""The demo model's tokenizer: byte pairs learnt from demo.txt. It needs Python alone: a router has no numpy."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

END_OF_TEXT, TURN_START, TURN_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = "system\nuser\nassistant\ntool\n"
MERGES = 1_000

Words: TypeAlias = dict[str, list[int]]  # each piece of text and its tokens
Pair: TypeAlias = tuple[int, int]


class Learnt(NamedTuple):
    dialogues: list[tuple[str, str]]
    merges: list[Pair]
    words: Words
    vocabulary: list[str]

    @property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.vocabulary)}


def learn() -> Learnt:
    """Return the text of demo.txt, and the tokens learnt from it."""
    known = dialogues()
    merges, words = learn_merges(pieces("\n".join((ROLES * 2, *(text for pair in known for text in pair)))))
    return Learnt(known, merges, words, vocabulary(merges))


def packaged(name: str) -> str:
    return files("replica.model").joinpath(name).read_text(encoding="utf-8")


def dialogues() -> list[tuple[str, str]]:
    """The questions and answers of demo.txt."""
    found = re.findall(r"^Q: (.*)\nA: (.*)$", packaged("demo.txt"), re.MULTILINE)
    return [(question, answer) for question, answer in found]


def pieces(text: str) -> list[str]:
    """Cut as `ByteLevel` of tokenizers cuts it, as far as ASCII goes."""
    return re.findall(
        r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", text, flags=re.ASCII
    )


def learn_merges(pieces: Iterable[str]) -> tuple[list[Pair], Words]:
    """Byte-pair encoding: joins the most frequent pair again and again, of equals the one with the lowest ids.

    Returns the pairs, and what each piece has become.
    """
    counts = Counter(pieces)
    words: Words = {piece: list(piece.encode()) for piece in counts}
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[str]] = defaultdict(set)
    for piece in words:
        _count_pairs(words, piece, counts[piece], pairs, where)
    merges: list[Pair] = []
    while len(merges) < MERGES:
        best = max(pairs, key=lambda pair: (pairs[pair], (-pair[0], -pair[1])))
        for piece in where.pop(best):
            _count_pairs(words, piece, -counts[piece], pairs, where)
            words[piece] = _joined(words[piece], best, 256 + len(merges))
            _count_pairs(words, piece, counts[piece], pairs, where)
        merges.append(best)
    return merges, words


def _count_pairs(
    words: Words, piece: str, count: int, pairs: Counter[Pair], where: defaultdict[Pair, set[str]]
) -> None:
    tokens = words[piece]
    for pair in pairwise(tokens):
        pairs[pair] += count
        where[pair].add(piece)


def _joined(tokens: list[int], pair: Pair, token: int) -> list[int]:
    joined: list[int] = []
    for each in tokens:
        if joined and (joined[-1], each) == pair:
            joined[-1] = token
        else:
            joined.append(each)
    return joined


def vocabulary(merges: list[Pair]) -> list[str]:
    """Each token as tokenizers spell it: a printable character for every byte."""
    tokens = [spelled(byte) for byte in range(256)]
    for left, right in merges:
        tokens.append(tokens[left] + tokens[right])
    return [*tokens, *SPECIALS]


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]


def spelled(byte: int) -> str:
    """GPT-2's alphabet: a byte that is a visible character stands for itself, the others follow from 256 on."""
    return chr(byte) if byte in _PRINTABLE else chr(256 + _OTHERS.index(byte))


def tokenizer(vocabulary: list[str], merges: list[Pair]) -> dict[str, Any]:
    first_special = len(vocabulary) - len(SPECIALS)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": first_special + i, "content": token, **plain, "special": True} for i, token in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(vocabulary[:first_special])},
            "merges": [[vocabulary[left], vocabulary[right]] for left, right in merges],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
    }
