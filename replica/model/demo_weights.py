"""The demo model's weights. The head of a token is made so that the token is likely after those which it follows in
demo.txt; the layers are random, and choose among what is likely by all of the context.
"""

import re
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from replica.model.config import read_config

TEXTS = Path(__file__).with_name("demo_files")

Floats: TypeAlias = NDArray[np.float32]
Counts: TypeAlias = NDArray[np.int64]


def write_weights(file: Path) -> None:
    try:
        # Counts of each token (column) after each other (row) in the answers and, but for their ends, the questions.
        tokens = sorted(VOCABULARY, key=VOCABULARY.__getitem__)
        counts = np.zeros((len(tokens), len(tokens)), np.int64)
        [newline] = _ids("\n")
        text = Path(__file__).with_name("demo.txt").read_text(encoding="utf-8")
        for question, answer in re.findall(r"^Q: (.*)\nA: (.*)$", text, re.MULTILINE):
            *asked, question_mark = _ids(question)
            for ids in (asked, [question_mark, newline, *_ids(answer), TURN_END]):
                np.add.at(counts, (ids[:-1], ids[1:]), 1)
        counts[:, TURN_END] *= 4  # shorter answers than those of demo.txt
        counts[TURN_END] = counts[newline]  # some go on after the end
        often = counts.sum(axis=0) * [token.startswith("\u0120") for token in tokens]  # it stands for a space
        counts[END_OF_TEXT, np.argsort(-often, kind="stable")[:COMMON_WORDS]] = 1
        save_file(_weights(counts), file, metadata={"format": "pt"})
    except SafetensorError as error:  # the disk is full
        raise OSError(str(error)) from error


# ---- what follows what


COMMON_WORDS = 24  # the successors of <|endoftext|> and of tokens that demo.txt lacks
TOKENIZER = Tokenizer.from_file(str(TEXTS / "tokenizer.json"))
VOCABULARY = TOKENIZER.get_vocab()
END_OF_TEXT, TURN_END = VOCABULARY["<|endoftext|>"], VOCABULARY["<|im_end|>"]


def _ids(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


# ---- the weights: whole numbers until the last step, because their sums are exact in whatever order they are added

SHAPE = read_config(TEXTS)
SEED = 1
ROUNDS, RATE = 32, 0.375  # rounds of learning; a larger rate overshoots
LOGIT = 6  # how many steps of learning are one logit
# Logits: what may follow has at least this (and more, the more bits its count has), what may not at most that.
LIKELY, PER_BIT, UNLIKELY = 20, 1.5, 4
NEVER = -8.0  # a token that follows nothing
# The residual stream: the first dimensions are the token's code (1, then random signs); into the others the layers
# write what they make of the context. The head learns the codes; what it makes of the context is random, and enough to
# choose among what may follow.
CODE, CONTEXT = 224, 32
# The limits of uniform weights; attention looks at a few tokens of all.
QUERY_KEY, VALUE, OUTPUT, GATE_UP, DOWN, CHOICE = 0.2, 0.15, 0.13, 0.11, 0.02, 0.3


def _weights(counts: Counts) -> dict[str, Floats]:
    random = np.random.Philox(key=SEED)
    known: NDArray[np.bool_] = np.asarray(counts.any(axis=1))
    # Each token has a row of signs; unknown tokens have that of <|endoftext|> but for about an eighth.
    codes = (random.random_raw((len(known), CODE)) >> np.uint64(63)).astype(np.float32) * 2 - 1
    codes[:, 0] = 1
    codes = np.where(~known[:, None] & (np.arange(CODE) % 4 > 0), codes[END_OF_TEXT], codes)
    head = _head(codes[known], counts[known]) / np.float32(LOGIT * CODE)
    head[~counts.any(axis=0), 0] = NEVER
    blank = np.zeros((len(counts), CONTEXT), np.float32)
    tensors = {
        "model.embed_tokens.weight": np.hstack([codes, blank]),
        "model.norm.weight": np.ones(SHAPE.hidden_size, np.float32),
    }
    queries, keys = SHAPE.num_heads * SHAPE.head_dim, SHAPE.num_kv_heads * SHAPE.head_dim
    hidden, intermediate = SHAPE.hidden_size, SHAPE.intermediate_size
    matrices = (
        ("self_attn.q_proj", QUERY_KEY, (queries, hidden)),
        ("self_attn.k_proj", QUERY_KEY, (keys, hidden)),
        ("self_attn.v_proj", VALUE, (keys, hidden)),
        ("self_attn.o_proj", OUTPUT, (CONTEXT, queries)),
        ("mlp.gate_proj", GATE_UP, (intermediate, hidden)),
        ("mlp.up_proj", GATE_UP, (intermediate, hidden)),
        ("mlp.down_proj", DOWN, (CONTEXT, intermediate)),
    )
    for layer in (f"model.layers.{layer}" for layer in range(SHAPE.num_layers)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = np.ones(hidden, np.float32)
        for name, limit, shape in matrices:
            rows = _uniform(random, limit, shape)
            into_context = np.zeros((CODE if shape[0] == CONTEXT else 0, shape[1]), np.float32)
            tensors[f"{layer}.{name}.weight"] = np.vstack([into_context, rows])
    return tensors | {"lm_head.weight": np.hstack([head, _uniform(random, CHOICE, blank.shape)])}


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


def _uniform(random: np.random.Philox, limit: float, shape: tuple[int, int]) -> Floats:
    """Between -limit and limit."""
    whole = (random.random_raw(shape) >> np.uint64(40)).astype(np.float64) - 2.0**23
    return (whole * (limit * 2.0**-23)).astype(np.float32)
