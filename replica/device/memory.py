"""How a GPU's memory is shared out: arithmetic, of what was measured."""

from collections.abc import Sequence
from typing import NamedTuple

from replica.device.machine import Memory
from replica.sizing import GIGABYTE, blocks_in, kv_memory


class Needs(NamedTuple):
    """In bytes: what a step takes beside weights and KV, and what all graphs hold."""

    step: int
    graphs: int


def blocks_that_fit(memory: Memory, utilization: float, needs: Needs, block_size: int, bytes_per_token: int) -> int:
    """With the weights loaded: of what is taken by now, whoever took it, nothing can be had."""
    taken = memory.total - memory.free
    left = kv_memory(memory.total, utilization, taken, needs.step + needs.graphs)
    blocks = blocks_in(left, block_size, bytes_per_token) - 1  # one is for the rows that fill up a graph's batch
    if blocks < 1:
        raise MemoryError(
            f"no KV fits: the GPU has {_gb(memory.total)}, of which {utilization:g} may be used "
            f"(--gpu-memory-utilization); {_gb(taken)} are taken, mostly by weights, and a step needs "
            f"{_gb(needs.step)}, graphs {_gb(needs.graphs)}; raise it, lower --max-num-batched-tokens or "
            "--max-num-seqs, or take a larger GPU"
        )
    return blocks


def graphs_bytes(taken: Sequence[int], count: int) -> int:
    """By what the largest and the next took, in this order: they share what they compute in, and the rest take less."""
    return sum(taken) + (taken[-1] * (count - len(taken)) if taken else 0)


def _gb(size: float) -> str:
    return f"{size / GIGABYTE:.1f} GB"
