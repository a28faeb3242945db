"""The demo model: a small Llama that was never trained, made on first use, the same to the bit on every machine.

It babbles. The head of a token is made so that the token is likely after those which it follows in demo.txt; the layers
are random, and choose among what is likely by all of the context. Raise VERSION and correct SIZES when any of its files
changes: a folder that is whole is never made again.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

VERSION = 1
CACHE_VARIABLE = "WARMROUTE_CACHE_DIR"
SIZES = {
    "chat_template.jinja": 950,
    "config.json": 538,
    "generation_config.json": 26,
    "model.safetensors": 12_028_992,
    "tokenizer.json": 52_819,
    "tokenizer_config.json": 176,
}
ABANDONED_AFTER_S = 3600.0  # making it takes seconds

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 512, 8, 4, 32
END_OF_TEXT, TURN_START, TURN_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = "system\nuser\nassistant\ntool\n"
MERGES = 1_000

Floats: TypeAlias = NDArray[np.float32]
Counts: TypeAlias = NDArray[np.int64]
Words: TypeAlias = dict[str, list[int]]  # each piece of text and its tokens
Pair: TypeAlias = tuple[int, int]


def demo_folder() -> Path:
    """The folder of the demo model, in Hugging Face's layout; made if it is not there yet, or not whole."""
    folder = _cache_folder() / f"demo-{VERSION}"
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        _made_beside(folder)
    except (OSError, SafetensorError) as error:  # the second one when the disk is full
        reason = f"the demo model cannot be written to {folder.parent}: {error}"
        raise OSError(f"{reason}; set {CACHE_VARIABLE} to a folder that can be written to") from error
    return folder


def _cache_folder() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    folder = chosen or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "warmroute")
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:  # an unknown user, or no HOME
        raise ValueError(f"{folder!r} begins with no home folder; set {CACHE_VARIABLE} to a whole path") from error


def _is_whole(folder: Path) -> bool:
    """By names and sizes: reading it all would take as long as making it."""
    files = {name: folder / name for name in SIZES}
    return all(file.is_file() and file.stat().st_size == SIZES[name] for name, file in files.items())


def _remove_abandoned(cache: Path) -> None:
    """What makers left that were killed."""
    for unfinished in cache.glob(".demo-*"):
        with contextlib.suppress(FileNotFoundError):  # another one removes it too
            if time.time() - unfinished.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(unfinished, ignore_errors=True)


def _made_beside(folder: Path) -> None:
    """Under another name first, so that nobody ever sees half of it."""
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write_demo(unfinished)
        unfinished.chmod(0o755)  # mkdtemp's folders are for their owner alone
        _put(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put(made: Path, folder: Path) -> None:
    """In a folder that is there, damaged or of another who was faster, each file takes the place of an equal one."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        for file in made.iterdir():
            file.replace(folder / file.name)


def write_demo(folder: Path) -> None:
    """All files of the model."""
    dialogues = _dialogues()
    merges, words = learn_merges(_pieces("\n".join((ROLES * 2, *(text for pair in dialogues for text in pair)))))
    vocabulary = _vocabulary(merges)
    ids = {token: i for i, token in enumerate(vocabulary)}
    save_file(_weights(_followers(dialogues, words, ids)), folder / "model.safetensors", metadata={"format": "pt"})
    turn_end = ids[TURN_END]
    _write_json(folder / "tokenizer.json", _tokenizer(vocabulary, merges))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _write_json(folder / "config.json", _config(len(vocabulary), turn_end))
    _write_json(folder / "generation_config.json", {"eos_token_id": turn_end})
    (folder / "chat_template.jinja").write_text(_packaged("demo.jinja"), encoding="utf-8")


def _packaged(name: str) -> str:
    return files("replica.model").joinpath(name).read_text(encoding="utf-8")


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _dialogues() -> list[tuple[str, str]]:
    """The questions and answers of demo.txt."""
    found = re.findall(r"^Q: (.*)\nA: (.*)$", _packaged("demo.txt"), re.MULTILINE)
    return [(question, answer) for question, answer in found]


# ---- the tokenizer


def _pieces(text: str) -> list[str]:
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


def _vocabulary(merges: list[Pair]) -> list[str]:
    """Each token as tokenizers spell it: a printable character for every byte."""
    tokens = [_spelled(byte) for byte in range(256)]
    for left, right in merges:
        tokens.append(tokens[left] + tokens[right])
    return [*tokens, *SPECIALS]


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]


def _spelled(byte: int) -> str:
    """GPT-2's alphabet: a byte that is a visible character stands for itself, the others follow from 256 on."""
    return chr(byte) if byte in _PRINTABLE else chr(256 + _OTHERS.index(byte))


def _tokenizer(vocabulary: list[str], merges: list[Pair]) -> dict[str, Any]:
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


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
    }


def _config(vocab_size: int, turn_end: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": turn_end,
        "dtype": "float32",
    }


# ---- what follows what


COMMON_WORDS = 24  # what follows <|endoftext|>, and all tokens that demo.txt does not have


def _followers(dialogues: list[tuple[str, str]], words: Words, ids: dict[str, int]) -> Counts:
    """How often each token (column) follows each other (row) in the answers and, but for their ends, the questions."""
    counts = np.zeros((len(ids), len(ids)), np.int64)
    [newline], turn_end = words["\n"], ids[TURN_END]
    for question, answer in dialogues:
        *asked, question_mark = (token for piece in _pieces(question) for token in words[piece])
        answered = (token for piece in _pieces(answer) for token in words[piece])
        for tokens in (asked, [question_mark, newline, *answered, turn_end]):
            np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    counts[:, turn_end] *= 4  # shorter answers than those of demo.txt
    counts[turn_end] = counts[newline]  # for those who go on after the end
    often = counts.sum(axis=0) * [token.startswith(_spelled(ord(" "))) for token in ids]
    counts[ids[END_OF_TEXT], np.argsort(-often, kind="stable")[:COMMON_WORDS]] = 1
    return counts


# ---- the weights: whole numbers until the last step, because their sums are exact in whatever order they are added

SEED = 1
ROUNDS, RATE = 32, 0.375  # of learning; a larger rate overshoots
LOGIT = 6  # how many steps of learning are one logit
# Logits: what may follow has at least this (and more, the more bits its count has), what may not at most that.
LIKELY, PER_BIT, UNLIKELY = 20, 1.5, 4
NEVER = -8.0  # what follows nothing
# The residual stream: the first dimensions are the token's code (1, then random signs); into the others the layers
# write what they make of the context. The head learns the codes; what it makes of the context is random, and enough to
# choose among what may follow.
CODE, CONTEXT = 224, 32
# The limits of uniform weights; attention looks at a few tokens of all.
QUERY_KEY, VALUE, OUTPUT, GATE_UP, DOWN, CHOICE = 0.2, 0.15, 0.13, 0.11, 0.02, 0.3


def _weights(counts: Counts) -> dict[str, Floats]:
    random = np.random.Philox(key=SEED)
    known: NDArray[np.bool_] = np.asarray(counts.any(axis=1))
    codes = _codes(random, known)
    head = _head(codes[known], counts[known]) / np.float32(LOGIT * CODE)
    head[~counts.any(axis=0), 0] = NEVER
    blank = np.zeros((len(counts), CONTEXT), np.float32)
    tensors = {
        "model.embed_tokens.weight": np.hstack([codes, blank]),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in _layer(random)}
    return tensors | {"lm_head.weight": np.hstack([head, _uniform(random, CHOICE, blank.shape)])}


def _codes(random: np.random.Philox, known: NDArray[np.bool_]) -> Floats:
    """A row of signs for each token; those of unknown tokens are that of <|endoftext|> but for about an eighth."""
    codes = _signs(random, (len(known), CODE))
    codes[:, 0] = 1
    alike = ~known[:, None] & (np.arange(CODE) % 4 > 0)
    return np.where(alike, codes[-len(SPECIALS)], codes)


def _head(codes: Floats, counts: Counts) -> Floats:
    """Learns, by the rule of the perceptron, which columns follow each row. Below 2**24 float32 adds exactly."""
    bits = np.frexp(counts.astype(np.float64))[1]
    unit = LOGIT * CODE
    least = np.where(bits > 0, unit * (LIKELY + PER_BIT * bits), -(2**24)).astype(np.float32)
    most = np.where(bits > 0, least * 1.125, unit * UNLIKELY).astype(np.float32)
    head = LOGIT * LIKELY * ((bits > 0).astype(np.float32).T @ codes)
    for _ in range(ROUNDS):
        given = codes @ head.T
        error = np.rint((np.clip(given, least, most) - given) * np.float32(RATE / CODE))
        head += error.T @ codes
    assert np.abs(head).max() * CODE < 2**24
    return head


def _layer(random: np.random.Philox) -> Iterator[tuple[str, Floats]]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", np.ones(HIDDEN, np.float32)
    for name, limit, shape in (
        ("self_attn.q_proj", QUERY_KEY, (queries, HIDDEN)),
        ("self_attn.k_proj", QUERY_KEY, (keys, HIDDEN)),
        ("self_attn.v_proj", VALUE, (keys, HIDDEN)),
        ("self_attn.o_proj", OUTPUT, (CONTEXT, queries)),
        ("mlp.gate_proj", GATE_UP, (INTERMEDIATE, HIDDEN)),
        ("mlp.up_proj", GATE_UP, (INTERMEDIATE, HIDDEN)),
        ("mlp.down_proj", DOWN, (CONTEXT, INTERMEDIATE)),
    ):
        rows = _uniform(random, limit, shape)
        into_context = np.zeros((CODE if shape[0] == CONTEXT else 0, shape[1]), np.float32)
        yield f"{name}.weight", np.vstack([into_context, rows])


def _uniform(random: np.random.Philox, limit: float, shape: tuple[int, int]) -> Floats:
    """Between -limit and limit."""
    whole = (random.random_raw(shape) >> np.uint64(40)).astype(np.float64) - 2.0**23
    return (whole * (limit * 2.0**-23)).astype(np.float32)


def _signs(random: np.random.Philox, shape: tuple[int, ...]) -> Floats:
    bits = random.random_raw(shape) >> np.uint64(63)
    return bits.astype(np.float32) * 2 - 1
