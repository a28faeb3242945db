"""A step for a GPU: all sequences as tensors on the device, ready to be captured in a graph.

Nothing here depends on the host knowing a length: `longest` only says how many tokens a sequence may have at most.
"""

from typing import NamedTuple

from torch import Tensor


class Mixed(NamedTuple):
    """The split of a graph that has prompts: the step's own `decoding` is 0, and all rows count as `prefilling`."""

    decoding: Tensor  # int32 [1]: number of decoding sequences
    prompts: int  # sequences behind those, at most


class TableStep(NamedTuple):
    """Block tables, decoding sequences first. A sequence of length 0 is padding: its results are finite but undefined.

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
    plan: Tensor | None = None  # the plan of the attention that will compute it; None: each layer makes its own
