"""A step for a GPU: all sequences in tensors on the device, which a graph can be captured with.

Nothing here depends on the host knowing a length: `longest` only says how many tokens a sequence may have at most.
"""

from typing import NamedTuple

from torch import Tensor


class Mixed(NamedTuple):
    """Of a graph of steps with prompts: then `decoding` of the step is 0, and all of its rows are `prefilling`."""

    decoding: Tensor  # int32 [1]: so many sequences decode
    prompts: int  # sequences behind those, at most


class TableStep(NamedTuple):
    """The sequences that decode stand first. One of length 0 is nobody's: its rows come out as anything finite.

    Behind the last sequence there may be rows, which come out as anything, and sequences without rows.
    """

    positions: Tensor  # int64 [rows]
    slots: Tensor  # int64 [rows]
    tables: Tensor  # int32 [sequences, width], contiguous: the blocks of each; behind its last one anything
    lengths: Tensor  # int32 [sequences]: tokens of each, with those of this step
    starts: Tensor  # int32 [sequences + 1]: the first row of each, and the end of the last
    decoding: int
    prefilling: int
    longest_prefill: int  # rows of one sequence; 0 where none prefills
    longest: int  # tokens of one sequence, at most; width * block_size or less
    mixed: Mixed | None = None
