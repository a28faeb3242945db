"""The shares of a GPU's memory: arithmetic with measured figures."""

from collections.abc import Sequence
from typing import NamedTuple

from replica.device.accelerator import Memory
from replica.sizing import GIGABYTE, blocks_in, kv_memory


class Needs(NamedTuple):
    """In bytes: what a step takes beside weights and KV, and what all graphs hold."""

    step: int
    graphs: int


def blocks_that_fit(
    before: Memory, loaded: Memory, utilization: float, needs: Needs, block_size: int, bytes_per_token: int
) -> int:
    """`before` anything was loaded, and with the weights. What others hold is not counted, but it cannot be had."""
    weights = max(0, before.free - loaded.free)
    workspace = needs.step + needs.graphs
    left = min(kv_memory(before.total, utilization, weights, workspace), loaded.free - workspace)
    blocks = blocks_in(left, block_size, bytes_per_token) - 1  # one is for the rows that fill up a graph's batch
    if blocks < 1:
        raise MemoryError(
            f"no KV fits: {utilization:g} of the GPU's {_gb(before.total)} may be used (--gpu-memory-utilization), "
            f"and others hold {_gb(before.total - before.free)}; weights take {_gb(weights)}, a step "
            f"{_gb(needs.step)}, graphs {_gb(needs.graphs)}; raise it, lower --max-num-batched-tokens or "
            "--max-num-seqs, or take a larger GPU"
        )
    return blocks


def graphs_bytes(taken: Sequence[int], count: int) -> int:
    """By what the largest and the next took, in this order: they share what they compute in, and the rest take less."""
    return sum(taken) + (taken[-1] * (count - len(taken)) if taken else 0)


def _gb(size: float) -> str:
    return f"{size / GIGABYTE:.1f} GB"
