"""Answers without a model: the next token depends on the last four, so greedy answers are equal on all workers."""

import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.outputs import LogprobsLists

END = 2  # the token that ends an answer of the model that `model.py` makes
FIRST, WORDS = 300, 4000  # the tokens that answers consist of
SEEN = 4  # tokens that the next one depends on
LOGPROB = -1.0


def next_token(tokens: Sequence[int], mask: Any = None) -> int:
    """The next token; `mask`: the bits of those that a grammar allows."""
    seed = zlib.crc32(array("q", tokens[-SEEN:]).tobytes())
    if mask is None:
        return FIRST + seed % WORDS
    allowed = np.flatnonzero(np.unpackbits(np.asarray(mask, dtype="<i4").view(np.uint8), bitorder="little"))
    return END if END in allowed else int(allowed[seed % len(allowed)])


def logprobs(sampled: Sequence[Sequence[int]], most: int) -> LogprobsLists:
    """Log-probabilities of these tokens and of `most` others, all of them the same."""
    rows = [[token, *range(FIRST, FIRST + most)] for answer in sampled for token in answer]
    until = np.cumsum([0, *map(len, sampled)]).tolist()
    shape = (len(rows), 1 + most)
    return LogprobsLists(
        np.array(rows, dtype=np.int32).reshape(shape),
        np.full(shape, LOGPROB, dtype=np.float32),
        np.ones(len(rows), dtype=np.int32),
        until,
    )
