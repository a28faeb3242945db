"""The runner on a device; the host reads one step's results while the next one computes.

In the order of the device's work a step is: what is new of the block tables, copies of beginnings of blocks, the
inputs, the model, the draw. Where all decode, and in small steps with few prompts, model and draw are the replay of a
graph.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.adapters import ROOM, Cut, Tiles, cut
from kernels.paged import Attention, LayerCache
from kernels.spans import Copy
from kernels.tables import Mixed, TableStep
from replica.device.accelerator import Accelerator, Replay
from replica.device.inputs import BlockTables, Counts, Inputs, Numbers, Staging
from replica.device.sizes import MIXED_PROMPTS, Limits, Size, size_for
from replica.lora.adapter import Changing
from replica.lora.slots import Slots, SlottedRows
from replica.messages import TokenLogprobs
from replica.runners.request import Scheduled
from replica.runners.runner import BlockMemory, Finish, SampledToken
from replica.runners.sampling import (
    GREEDY_BELOW,
    bits_of,
    is_shaped,
    keep_prompt_logprobs,
    logprobs_of,
    shaped,
    uniform,
)
from replica.transformer import Transformer

MOST = 2**31 - 1  # tokens in a vocabulary
HOTTEST = 1e30  # a temperature, in float32 too
NO_TILES = cut(np.zeros(0, np.int32))

Draw: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


class DeviceRunner:
    """The last block of the caches belongs to no request: padding of a graph's batch is written there."""

    ahead = True
    weights_digest = ""

    def __init__(
        self,
        model: Transformer,
        attention: Attention[TableStep],
        draw: Draw,
        caches: Sequence[LayerCache],
        limits: Limits,
        accelerator: Accelerator,
        memory: BlockMemory | None = None,
    ) -> None:
        """`memory` is for lower media."""
        self.model = model
        self.adapters = model.adapters
        self.attention_name = attention.name
        self.vocab_size = model.config.vocab_size
        self.num_blocks, self.block_size = len(caches[0].keys) - 1, caches[0].keys.shape[1]
        self.limits = limits
        self.memory = memory
        self.graphs: dict[Size, Replay] = {}
        self._attention = attention
        self._caches = caches
        self._accelerator = accelerator
        self._tables = BlockTables(limits.requests, -(-limits.tokens // self.block_size), accelerator)
        self._staging = Staging(limits.largest, accelerator)
        self._draw = draw
        self._logits = torch.zeros(limits.requests, self.vocab_size, device=accelerator.device)
        self._drawn = torch.zeros(limits.requests, dtype=torch.int64, device=accelerator.device)
        self._sizes: dict[tuple[bool, bool], tuple[int, ...]] = {}  # each kind's numbers of rows, in ascending order
        self._pool = accelerator.pool()
        self._slots = Slots(model.adapters, accelerator.device) if limits.adapters else None
        self._masks = Masks(limits.requests, self.vocab_size, accelerator)
        self._received = [accelerator.host_bytes(self._drawn.nbytes).view(torch.int64) for _ in range(2)]  # take turns
        self._drawers: dict[int, int] = {}  # requests that drew a token in the last step, and its place

    @property
    def own_bytes(self) -> int:
        """Beside weights and KV; the logits four times, because steps in which clients shape them keep copies."""
        return 4 * self._logits.nbytes + self._tables.table.nbytes + self._staging.nbytes + self._masks.nbytes

    # ---- one step

    @torch.inference_mode()
    def start(self, batch: Sequence[Scheduled]) -> Finish:
        """Give the device the step; the function that is returned waits for it."""
        if not batch:
            return list
        order = sorted(range(len(batch)), key=lambda index: batch[index].tokens > 1)  # those that decode first
        ordered = [batch[index] for index in order]
        inputs, hidden = self._compute(batch, ordered)
        if hidden is not None and any(one.request.computes_whole_prompt for one in ordered):
            last_rows = np.cumsum([scheduled.tokens for scheduled in ordered]) - 1
            keep_prompt_logprobs(self.model, ordered, hidden, last_rows.tolist())
        drawing = {place: one for place, one in enumerate(ordered) if one.samples}
        # Tokens that may not come next in constrained answers are ruled out.
        places = list(drawing)
        bits = bits_of([one.request for one in drawing.values()])
        if bits:
            self._masks.apply(self._logits, {places[number]: of_request for number, of_request in bits.items()})
        shaping = {place: one for place, one in drawing.items() if is_shaped(one.request, one.position)}
        if shaping:
            # Once more, where clients add something to the logits: few do. Log probabilities are of those without.
            shaped_rows = torch.tensor(list(shaping)).to(self._logits.device)
            kept = self._logits[shaped_rows]
            chosen = shaping.values()
            rows = shaped(kept, [one.request for one in chosen], [one.position for one in chosen])
            # Every token would end the output too early where none is left: the model's own counts.
            self._logits[shaped_rows] = torch.where(rows.isneginf().all(1, keepdim=True), kept, rows)
            self._draw_all(inputs)
            self._logits[shaped_rows] = kept
        elif bits:
            self._draw_all(inputs)
        self._drawers = {one.request.id: place for place, one in drawing.items()}
        return self._receive(drawing, order)

    def _compute(self, batch: Sequence[Scheduled], ordered: Sequence[Scheduled]) -> tuple[Inputs, Tensor | None]:
        """Compute the rows of the requests, and draw; return the states of all rows, or None if a graph has them."""
        table_rows = np.array(self._tables.of([scheduled.request for scheduled in ordered]))
        decoding = sum(scheduled.tokens == 1 for scheduled in ordered)
        rows, sequences = sum(scheduled.tokens for scheduled in ordered), len(ordered)
        scores = any(scheduled.request.computes_whole_prompt for scheduled in ordered)
        names = [scheduled.request.chain.lora_name for scheduled in ordered]
        adapters = list(dict.fromkeys(name for name in names if name is not None))
        tiles, fits_graph = NO_TILES, not adapters
        if self._slots is not None:
            of_each = [-1 if name is None else self._slots.numbers[name] for name in names]
            tiles = cut(np.repeat(np.array(of_each, np.int32), [scheduled.tokens for scheduled in ordered]))
            fits_graph = not adapters or self._slots.room(adapters) <= ROOM
        size = None
        if fits_graph and not scores and sequences - decoding <= MIXED_PROMPTS:
            kind = decoding < sequences, bool(adapters)
            rows_of_graph = size_for(self._sizes.get(kind, ()), rows)
            size = None if rows_of_graph is None else Size(kind[0], rows_of_graph, kind[1])
        counts = Counts(rows, sequences, len(tiles.tiles)) if size is None else self.limits.counts(size)
        arrays = self._arrays(counts, ordered, table_rows, tiles)
        self._tables.deliver()
        # The batch's order matters: a block that one request copies from may be a later one's to write on.
        copies = [scheduled.copy for scheduled in batch if scheduled.copy is not None]
        if copies:
            self.model.pointwise.copy(self._caches, copies)
        inputs = self._staging.send(counts, arrays)
        if size is not None:
            self.graphs[size]()
            return inputs, None
        longest_prefill = max((one.tokens for one in ordered[decoding:]), default=0)
        longest = max(scheduled.start + scheduled.tokens for scheduled in ordered)
        step = self._step(inputs, longest, decoding, longest_prefill)
        return inputs, self._run(inputs, step, self._adapted(inputs, adapters))

    def _step(
        self, inputs: Inputs, longest: int, decoding: int, longest_prefill: int, mixed: Mixed | None = None
    ) -> TableStep:
        tables = self._tables.table[inputs.table_rows, : -(-longest // self.block_size)]
        arrays = inputs.positions, inputs.slots, tables, inputs.lengths, inputs.starts
        return TableStep(*arrays, decoding, len(inputs.positions) - decoding, longest_prefill, longest, mixed)

    def _adapted(self, inputs: Inputs, names: Sequence[str] = ()) -> SlottedRows | None:
        """The rows with adapters; without names whichever fit into a graph."""
        if not len(inputs.tiles):
            return None
        assert self._slots is not None, "there are adapters"
        tiles = Tiles(inputs.adapted, inputs.tiles.view(-1, 3))
        return SlottedRows(self._slots, tiles, self._slots.room(names), self.model.pointwise)

    def _run(self, inputs: Inputs, step: TableStep, adapted: Changing | None = None) -> Tensor:
        """The model and the draw; what the rows came to."""
        ids = inputs.token_ids
        ids = torch.where(ids < 0, self._drawn[(-1 - ids).clamp_(min=0)], ids)
        step = step._replace(plan=self._attention.plan(step, self._caches[0]))
        hidden = self.model.hidden(ids, step, self._caches, self._attention, adapted)
        last = hidden[inputs.last_rows]
        self.model.logits(last, out=self._logits[: len(last)])
        self._draw_all(inputs)
        return hidden

    def _draw_all(self, inputs: Inputs) -> None:
        count = len(inputs.points)
        shapes = inputs.temperatures, inputs.top_ks, inputs.top_ps, inputs.min_ps
        self._draw(self._logits[:count], *shapes, inputs.points, self._drawn[:count])

    def _receive(self, drawing: Mapping[int, Scheduled], order: Sequence[int]) -> Finish:
        self._received.reverse()
        received = self._received[0][: len(order)]
        received.copy_(self._drawn[: len(order)], non_blocking=True)
        wait = self._accelerator.mark()
        logprobs: dict[int, TokenLogprobs] = {}
        if any(one.request.sampling.top_logprobs is not None for one in drawing.values()):
            wait()  # the next step's logits come into the same memory
            places, tokens = list(drawing), received.tolist()
            requests = [one.request for one in drawing.values()]
            found = logprobs_of(self._logits[places], [tokens[place] for place in places], requests)
            logprobs = {places[number]: of_token for number, of_token in found.items()}

        def finish() -> list[SampledToken | None]:
            wait()
            tokens = received.tolist()
            results: list[SampledToken | None] = [None] * len(order)
            for place in drawing:
                results[order[place]] = SampledToken(tokens[place], logprobs.get(place))
            return results

        return finish

    # ---- its inputs

    def _arrays(
        self, counts: Counts, ordered: Sequence[Scheduled], table_rows: Numbers, tiles: Cut
    ) -> dict[str, NDArray[Any]]:
        tokens = np.array([scheduled.tokens for scheduled in ordered], np.int64)
        begins = np.array([scheduled.start for scheduled in ordered], np.int64)
        ends = np.cumsum(tokens)
        of_row = np.repeat(np.arange(len(ordered)), tokens)
        positions = np.arange(len(of_row)) + (begins - ends + tokens)[of_row]
        blocks = self._tables.mirror[table_rows[of_row], positions // self.block_size].astype(np.int64)
        missing, nowhere = counts.sequences - len(ordered), self.num_blocks * self.block_size
        decoding = []
        for request, start, count, _ in ordered:
            if count == 1:
                known = request.chain.tokens
                # Otherwise the host does not know it yet: the step before draws it.
                decoding.append(known[start] if start < len(known) else -1 - self._drawers[request.id])
        parts = (scheduled.token_ids for scheduled in ordered[len(decoding) :])
        samplings = [scheduled.request.sampling for scheduled in ordered]
        points = [
            0.0 if sampling.temperature < GREEDY_BELOW else uniform(sampling.seed, max(0, scheduled.position))
            for scheduled, sampling in zip(ordered, samplings, strict=True)
        ]
        return {
            "token_ids": np.concatenate((np.array(decoding, np.int64), *parts)),
            "positions": positions,
            "slots": _and(blocks * self.block_size + positions % self.block_size, counts.rows - len(of_row), nowhere),
            "table_rows": _and(table_rows, missing, self._tables.empty_row),
            "lengths": begins + tokens,
            "starts": _and(np.append(0, ends), missing, len(of_row)),
            "last_rows": ends - 1,
            "decoding": np.array([np.count_nonzero(tokens == 1)]),
            "adapted": tiles.rows,
            "tiles": tiles.tiles.ravel(),
            # The rest decides the tokens, and changes nothing in rows that draw none.
            "temperatures": np.array([min(sampling.temperature, HOTTEST) for sampling in samplings]),
            "top_ks": np.array([min(sampling.top_k, MOST) for sampling in samplings]),
            "top_ps": np.array([sampling.top_p for sampling in samplings]),
            "min_ps": np.array([sampling.min_p for sampling in samplings]),
            "points": np.array(points),
        }

    # ---- before the first step

    @torch.inference_mode()
    def capture(self, size: Size) -> None:
        """Capture the graph of this size; larger ones have to come before. The inputs are padding only."""
        counts = self.limits.counts(size)
        inputs = self._staging.fixed(counts)
        self._staging.send(counts, self._arrays(counts, (), np.zeros(0, np.int64), NO_TILES))
        mixed = Mixed(inputs.decoding, MIXED_PROMPTS) if size.mixed else None
        decoding, longest_prefill = (0, size.rows) if size.mixed else (size.rows, 0)

        def run() -> None:
            step = self._step(inputs, self.limits.tokens, decoding, longest_prefill, mixed)
            self._run(inputs, step, self._adapted(inputs))

        run()  # compiles, and lets libraries take the memory they want
        self.graphs[size] = self._accelerator.capture(run, self._pool)
        kind = size.mixed, size.adapted
        self._sizes[kind] = tuple(sorted(one.rows for one in self.graphs if (one.mixed, one.adapted) == kind))

    def rehearse_copy(self) -> None:
        """Run in the final memory, whose size is part of the compiled code."""
        self.model.pointwise.copy(self._caches, [Copy(self.num_blocks, self.num_blocks, 1)])


def _and(given: NDArray[Any], missing: int, otherwise: int) -> NDArray[Any]:
    return np.concatenate((given, np.full(missing, otherwise))) if missing else given


PLACE_BYTES = 8


class Masks:
    """Two pieces of host memory take turns: while the device may still read one, the next step goes into the other."""

    def __init__(self, requests: int, vocab_size: int, accelerator: Accelerator) -> None:
        self._row_bytes = -(-vocab_size // 32) * 4
        size = requests * (PLACE_BYTES + self._row_bytes)
        self._hosts = [accelerator.host_bytes(size) for _ in range(2)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=accelerator.device)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=accelerator.device)

    @property
    def nbytes(self) -> int:
        return self._device.nbytes

    def apply(self, logits: Tensor, bits: Mapping[int, NDArray[np.uint8]]) -> None:
        """Rule out tokens in some rows: each has a bit for every token that may come next."""
        self._hosts.reverse()
        host = self._hosts[0].numpy()
        split = len(bits) * PLACE_BYTES
        end = split + len(bits) * self._row_bytes
        host[:split].view(np.int64)[:] = list(bits)
        np.stack(list(bits.values()), out=host[split:end].reshape(len(bits), self._row_bytes))
        self._device[:end].copy_(self._hosts[0][:end], non_blocking=True)
        rows = self._device[:split].view(torch.int64)
        packed = self._device[split:end].view(len(bits), self._row_bytes, 1)
        allowed = ((packed >> self._shifts) & 1).view(len(bits), -1)[:, : logits.shape[1]].bool()
        logits[rows] = torch.where(allowed, logits[rows], -torch.inf)
