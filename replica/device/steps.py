"""Steps on a device: the model's part of them, without requests.

In the order of the device's work a step is: what is new of the block tables, copies of beginnings of blocks, the
inputs, the model, the draw. Where all decode, and in small steps with few prompts, model and draw are the replay of a
graph.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.adapters import Tiles
from kernels.paged import Attention, LayerCache
from kernels.spans import Copy
from kernels.tables import Mixed, TableStep
from replica.device.accelerator import Accelerator, Replay
from replica.device.inputs import BlockTables, Counts, Inputs, Staging
from replica.device.sizes import MIXED_PROMPTS, Limits, Size, size_for
from replica.lora.adapter import Changing
from replica.lora.slots import Slots, SlottedRows
from replica.transformer import Transformer

Draw: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


class Order(NamedTuple):
    """Do the copies, then compute the rows; sequences that decode come first."""

    counts: Counts
    inputs: Mapping[str, NDArray[Any]]  # the arrays of `Inputs`
    copies: Sequence[Copy]
    adapters: Sequence[str]
    size: Size | None  # the size of the graph to replay
    # Steps without one need these:
    decoding: int  # sequences
    longest_prefill: int  # rows of a sequence that does not
    longest: int  # tokens of a sequence, cached ones included


class Computed(NamedTuple):
    inputs: Inputs
    hidden: Tensor | None  # the states of all rows; None: they are in a graph's memory


class Steps:
    """The last block of the caches belongs to no request: padding of a graph's batch is written there."""

    def __init__(
        self,
        model: Transformer,
        attention: Attention[TableStep],
        draw: Draw,
        caches: Sequence[LayerCache],
        limits: Limits,
        accelerator: Accelerator,
    ) -> None:
        self.model = model
        self.attention = attention
        self.caches = caches
        self.num_blocks, self.block_size = len(caches[0].keys) - 1, caches[0].keys.shape[1]
        self.limits = limits
        self.accelerator = accelerator
        self.tables = BlockTables(limits.requests, -(-limits.tokens // self.block_size), accelerator)
        self._staging = Staging(limits.largest, accelerator)
        self._draw = draw
        self.logits = torch.zeros(limits.requests, model.config.vocab_size, device=accelerator.device)
        self.drawn = torch.zeros(limits.requests, dtype=torch.int64, device=accelerator.device)
        self.graphs: dict[Size, Replay] = {}
        self._sizes: dict[tuple[bool, bool], tuple[int, ...]] = {}  # each kind's numbers of rows, in ascending order
        self._pool = accelerator.pool()
        self.slots: Slots | None = None
        if limits.adapters:
            self.slots = Slots(model.adapters, limits.adapters, accelerator.device)

    @property
    def own_bytes(self) -> int:
        """Beside weights and KV; the logits four times, because steps in which clients shape them keep copies."""
        return 4 * self.logits.nbytes + self.tables.table.nbytes + self._staging.nbytes

    @torch.inference_mode()
    def run(self, order: Order) -> Computed:
        self.tables.deliver()
        if order.copies:
            self.model.pointwise.copy(self.caches, order.copies)
        inputs = self._staging.send(order.counts, order.inputs)
        if order.size is not None:
            self.graphs[order.size]()
            return Computed(inputs, None)
        step = self._step(inputs, order.longest, order.decoding, order.longest_prefill)
        return Computed(inputs, self._run(inputs, step, self._adapted(inputs, order.adapters)))

    def rehearse_copy(self) -> None:
        """Run in the final memory, whose size is part of the compiled code."""
        self.model.pointwise.copy(self.caches, [Copy(self.num_blocks, self.num_blocks, 1)])

    def draw_all(self, inputs: Inputs) -> None:
        count = len(inputs.points)
        shapes = inputs.temperatures, inputs.top_ks, inputs.top_ps, inputs.min_ps
        self._draw(self.logits[:count], *shapes, inputs.points, self.drawn[:count])

    def size_for(self, rows: int, prompts: int, *, adapted: bool = False) -> Size | None:
        """The size of the smallest graph for such a step."""
        if prompts > MIXED_PROMPTS:
            return None
        place = size_for(self._sizes.get((prompts > 0, adapted), ()), rows)
        return None if place is None else Size(prompts > 0, place, adapted)

    @torch.inference_mode()
    def capture(self, size: Size, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Capture the graph of this size; larger ones have come before. The inputs are padding only."""
        counts = self.limits.counts(size)
        inputs = self._staging.fixed(counts)
        self._staging.send(counts, arrays)
        mixed = Mixed(inputs.decoding, MIXED_PROMPTS) if size.mixed else None
        decoding, longest_prefill = (0, size.rows) if size.mixed else (size.rows, 0)

        def run() -> None:
            step = self._step(inputs, self.limits.tokens, decoding, longest_prefill, mixed)
            self._run(inputs, step, self._adapted(inputs))

        run()  # compiles, and lets libraries take the memory they want
        self.graphs[size] = self.accelerator.capture(run, self._pool)
        kind = size.mixed, size.adapted
        self._sizes[kind] = tuple(sorted(one.rows for one in self.graphs if (one.mixed, one.adapted) == kind))

    def _step(
        self, inputs: Inputs, longest: int, decoding: int, longest_prefill: int, mixed: Mixed | None = None
    ) -> TableStep:
        tables = self.tables.table[inputs.table_rows, : -(-longest // self.block_size)]
        arrays = inputs.positions, inputs.slots, tables, inputs.lengths, inputs.starts
        return TableStep(*arrays, decoding, len(inputs.positions) - decoding, longest_prefill, longest, mixed)

    def _adapted(self, inputs: Inputs, names: Sequence[str] = ()) -> SlottedRows | None:
        """The rows with adapters; without names whichever fit into a graph."""
        if not len(inputs.tiles):
            return None
        assert self.slots is not None, "there are adapters"
        tiles = Tiles(inputs.adapted, inputs.tiles.view(-1, 3))
        return SlottedRows(self.slots, tiles, self.slots.room(names), self.model.pointwise)

    def _run(self, inputs: Inputs, step: TableStep, adapted: Changing | None = None) -> Tensor:
        """The model and the draw; what the rows came to."""
        ids = inputs.token_ids
        ids = torch.where(ids < 0, self.drawn[(-1 - ids).clamp_(min=0)], ids)
        step = step._replace(plan=self.attention.plan(step, self.caches[0]))
        hidden = self.model.hidden(ids, step, self.caches, self.attention, adapted)
        last = hidden[inputs.last_rows]
        self.model.logits(last, out=self.logits[: len(last)])
        self.draw_all(inputs)
        return hidden
