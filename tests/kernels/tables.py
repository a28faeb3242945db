"""Steps in tables, as for a GPU; invalid entries follow each sequence's last block."""

import torch
from torch import Tensor

from kernels.contexts import ContextStep
from kernels.paged import Attention, LayerCache
from kernels.pointwise import Pointwise
from kernels.tables import Mixed, TableStep
from tests.kernels.poison import poisoned
from tests.kernels.reference import ReferenceAttention
from tests.kernels.sequences import Sequence, Shape, memory, sequences

Part = tuple[Sequence, int, int]  # this many tokens, from the one at `start` on
NOBODY = 10**6


def table_step(parts: list[Part], decoding: int, shape: Shape, device: str = "cpu", spare: int = 2) -> TableStep:
    """`spare` columns are wider than they need be, and longer may a sequence get than any is."""
    width = max(len(sequence.blocks) for sequence, _, _ in parts) + spare
    tables = torch.full((len(parts), width), NOBODY, dtype=torch.int32)
    tables[:, 1::2] = -1
    for row, (sequence, start, count) in zip(tables, parts, strict=True):
        blocks = sequence.blocks[: -(-(start + count) // shape.block_size)]
        row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    counts = [count for _, _, count in parts]
    ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    context = ContextStep([sequence.span(start, count) for sequence, start, count in parts], shape.block_size)
    return TableStep(
        positions=context.positions.to(device),
        slots=context.slots.to(device),
        tables=tables.to(device),
        lengths=torch.tensor([start + count for _, start, count in parts], dtype=torch.int32, device=device),
        starts=ends.to(device),
        decoding=decoding,
        prefilling=sum(counts[decoding:]),
        longest_prefill=max(counts[decoding:], default=0),
        longest=width * shape.block_size,
    )


def as_mixed(step: TableStep, more_rows: int, more_sequences: int) -> TableStep:
    """The same as in a graph, which has room for more."""
    rows, table = step.decoding + step.prefilling + more_rows, torch.zeros_like(step.tables[:1])
    decoding = torch.tensor([step.decoding], dtype=torch.int32, device=step.lengths.device)
    return step._replace(
        tables=torch.cat((step.tables, *[table] * more_sequences)),
        lengths=torch.cat((step.lengths, step.lengths.new_zeros(more_sequences))),
        starts=torch.cat((step.starts, step.starts[-1:].expand(more_sequences))),
        decoding=0,
        prefilling=rows,
        longest_prefill=rows,
        mixed=Mixed(decoding, len(step.lengths) - step.decoding + more_sequences // 2),
    )


def both(
    attention: Attention[TableStep],
    shape: Shape,
    spans: list[tuple[int, int]],
    decoding: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    lengths_off: dict[int, int] | None = None,
    more: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The result of a backend and the expected one, for sequences of these lengths whose last tokens are rows.

    `lengths_off`: by so much the step is wrong about these sequences' lengths. `more`: see `as_mixed`.
    """
    lengths = [length for length, _ in spans]
    made = sequences(lengths, shape, seed=1, dtype=dtype)
    parts = [(sequence, length - count, count) for sequence, (length, count) in zip(made, spans, strict=True)]
    cache = memory(lengths, shape, dtype)
    for sequence, length in zip(made, lengths, strict=True):
        whole = ContextStep([sequence.span(0, length)], shape.block_size)
        Pointwise().store(sequence.keys, sequence.values, cache, whole)
    rows = [sequence.queries[start : start + count] for sequence, start, count in parts]
    step = table_step(parts, decoding, shape, device)
    for number, off in (lengths_off or {}).items():
        step.lengths[number] += off
    wide = torch.cat(rows).flatten(1).to(device)
    if more is not None:
        step = as_mixed(step, *more)
        wide = torch.cat((wide, torch.full_like(wide[:1], torch.nan).expand(more[0], -1)))
    # As a projection leaves them: keys and values stand between two rows' queries.
    wide = torch.cat((wide, torch.full_like(wide, torch.nan)), dim=1)[:, : wide.shape[1]]
    there = LayerCache(*(part.to(device) for part in cache))
    with poisoned():
        mine = attention.attend(wide.unflatten(1, (shape.heads, shape.head_dim)), there, step)
    rest = [sequence.span(start, count) for sequence, start, count in parts]
    context = ContextStep(rest, shape.block_size)
    return mine[: sum(map(len, rows))].cpu(), ReferenceAttention().attend(torch.cat(rows), cache, context)
