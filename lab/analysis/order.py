"""An order of a batch in which prompts with the same beginning follow each other."""

import numpy as np

from lab.analysis.accesses import Accesses, Integers


def depth_first(accesses: Accesses) -> Integers:
    """Places of the requests: through the tree of prefixes depth first, its branches in order of appearance.

    Numbers are given at first appearance, so sorting by them does that; equal prompts keep their order.
    """
    packed = memoryview(accesses.numbers.astype(">u4").tobytes())
    ends = (accesses.ends * 4).tolist()
    starts = [0, *ends[:-1]]
    keys = [bytes(packed[start:end]) for start, end in zip(starts, ends, strict=True)]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
