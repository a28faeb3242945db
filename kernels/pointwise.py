"""Operations on single rows and on KV memory, between matrix products and attention.

These are the steps that a GPU fuses; here they are for any device, and for a CPU, in float32, to the last bit the same
whatever rows stand beside (decision 0009).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.adapters import Table, Tiles
from kernels.paged import LayerCache, Step
from kernels.spans import Copy


class Heads(NamedTuple):
    """The shape of one layer's attention, and the norms of its queries and keys."""

    queries: int
    keys: int  # queries are a multiple of these
    head_dim: int
    norms: tuple[Tensor, Tensor] | None = None  # queries' and keys' norms, [head_dim] each
    eps: float = 1e-6


class Pointwise:
    name = "torch"
    adapts_in_graphs = False  # it asks the device which rows have adapters

    def add_norm(self, rows: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the rows plus `delta`, and their RMSNorm computed in float32. May reuse `rows`."""
        total = rows if delta is None else rows + delta
        return total, normed(total, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of each row."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def turn_and_store(self, qkv: Tensor, heads: Heads, turn: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Return the rotated queries, [rows, heads, head_dim]; store the rotated keys and the values.

        `turn` has each row's cosines and sines, [rows, 2, 1, head_dim / 2]. May take over `qkv`.
        """
        projected = qkv.unflatten(-1, (-1, heads.head_dim))
        turned, values = projected.split((heads.queries + heads.keys, heads.keys), dim=1)
        if heads.norms is not None:
            parts = zip(turned.split((heads.queries, heads.keys), dim=1), heads.norms, strict=True)
            turned = torch.cat([normed(part, weight, heads.eps) for part, weight in parts], dim=1)
        rotated = rotate(turned, turn)
        self.store(rotated[:, heads.queries :], values, cache, step)
        return rotated[:, : heads.queries]

    def store(self, keys: Tensor, values: Tensor, cache: LayerCache, step: Step) -> None:
        """Store the rows' KV, [rows, kv_heads, head_dim]."""
        for rows, memory in ((keys, cache.keys), (values, cache.values)):
            if memory.is_contiguous():
                memory.flatten(0, 1).index_copy_(0, step.slots, rows)
            else:  # on a device, where a block has all layers in one piece
                memory[step.slots // memory.shape[1], step.slots % memory.shape[1]] = rows

    def adapt(self, inputs: Tensor, product: Tensor, table: Table, tiles: Tiles, room: int) -> None:  # noqa: ARG002
        """Add to the rows of the product what their adapters change, whose ranks are `room` together at most."""
        for slot, rows in tiles.by_slot:
            if (change := table.change(slot)) is not None:
                change.add(inputs, product, rows)

    def copy(self, caches: Sequence[LayerCache], copies: Sequence[Copy]) -> None:
        """Copy within all layers, in this order. No source is the target of an earlier copy."""
        for cache in caches:
            for memory in cache:
                for copy in copies:
                    memory[copy.target, : copy.tokens] = memory[copy.source, : copy.tokens]


def normed(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    if rows.dtype == torch.float32 or rows.device.type != "cpu" or rows.numel() != len(weight):
        return functional.rms_norm(rows, weight.shape, weight, eps)
    # A single row, in two operations instead of eight.
    length = float(torch.linalg.vector_norm(rows, dtype=torch.float32))
    return torch.addcmul(rows.new_zeros(()), rows, weight, value=(length * length / len(weight) + eps) ** -0.5)


def silu(gate: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)). torch's own rounds the last values of a thread's share differently."""
    if gate.dtype != torch.float32:
        return functional.silu(gate)
    return gate / gate.neg().exp_().add_(1)


def rotate(heads: Tensor, turn: Tensor) -> Tensor:
    """Rotate [rows, heads, head_dim] by each row's cosines and sines; a pair is a dimension of either half."""
    halves = heads.unflatten(-1, (2, -1))
    cosines, sines = turn.unsqueeze(2).unbind(1)
    turned: Tensor = halves * cosines
    across = halves * sines
    turned[:, :, 0].sub_(across[:, :, 1])
    turned[:, :, 1].add_(across[:, :, 0])
    return turned.flatten(2)
