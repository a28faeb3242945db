"""The runner on a device; the host reads one step's results while the next one computes.

In the order of the device's work a step is: what is new of the block tables, copies of beginnings of blocks, the
inputs, the model, the draw, the tokens to the host. Where all decode, and in small steps with few prompts, model and
draw are the replay of a graph.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged import Attention, LayerCache
from kernels.tables import Mixed, TableStep
from replica import prompt_logprobs
from replica.block_memory import BlockMemory
from replica.device.accelerator import Accelerator, Replay
from replica.device.block_tables import BlockTables, Numbers
from replica.device.graph_sizes import MIXED_PROMPTS, size_for
from replica.device.inputs import Counts, Inputs, Staging
from replica.device.masks import Masks
from replica.lora.adapter import AdaptedRows
from replica.messages import TokenLogprobs
from replica.model.transformer import Transformer
from replica.request import Scheduled
from replica.runner import Finish, SampledToken
from replica.sampling import GREEDY_BELOW, bits_of, is_shaped, logprobs_of, shaped, uniform

Draw: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]

MOST = 2**31 - 1  # tokens in a vocabulary


class Size(NamedTuple):
    """The size of a graph: rows of decoding sequences, one each, or of any."""

    mixed: bool
    rows: int


class Limits(NamedTuple):
    """`rows` tokens of `requests` requests in a step, each of at most `tokens` in all."""

    rows: int
    requests: int
    tokens: int


class DeviceRunner:
    """The last block of the caches belongs to no request: padding of a graph's batch is written there."""

    ahead = True

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
        self.adapters = model.adapters
        self.attention = attention
        self.attention_name = attention.name
        self.vocab_size = model.config.vocab_size
        self.num_blocks = len(caches[0].keys) - 1
        self.caches = caches
        self.memory: BlockMemory | None = None  # where lower media are wanted
        self.limits = limits
        self._draw = draw
        self._accelerator = accelerator
        self.block_size = caches[0].keys.shape[1]
        self._tables = BlockTables(limits.requests, -(-limits.tokens // self.block_size), accelerator)
        self._staging = Staging(Counts(limits.rows, limits.requests), accelerator)
        self._logits = torch.zeros(limits.requests, self.vocab_size, device=accelerator.device)
        self._masks = Masks(limits.requests, self.vocab_size, accelerator)
        self._drawn = torch.zeros(limits.requests, dtype=torch.int64, device=accelerator.device)
        self._received = [accelerator.host_bytes(self._drawn.nbytes).view(torch.int64) for _ in range(2)]  # take turns
        self._drawers: dict[int, int] = {}  # requests that drew a token in the last step, and its place
        self._graphs: dict[Size, Replay] = {}
        self._sizes: dict[bool, tuple[int, ...]] = {True: (), False: ()}  # of those, in ascending order
        self._pool = accelerator.pool()

    @property
    def own_bytes(self) -> int:
        """Beside weights and KV; the logits four times, because steps in which clients shape them keep copies."""
        return 4 * self._logits.nbytes + self._tables.table.nbytes + self._staging.nbytes + self._masks.nbytes

    def close(self) -> None:
        """Nothing but this process and its device computes."""

    # ---- one step

    @torch.inference_mode()
    def start(self, batch: Sequence[Scheduled]) -> Finish:
        """Give the device the step; the function that is returned waits for it."""
        if not batch:
            return list
        order = sorted(range(len(batch)), key=lambda index: batch[index].tokens > 1)  # those that decode first
        ordered = [batch[index] for index in order]
        table_rows = np.array(self._tables.of([scheduled.request for scheduled in ordered]))
        self._tables.deliver()
        if copies := [scheduled.copy for scheduled in batch if scheduled.copy is not None]:
            self.model.pointwise.copy(self.caches, copies)
        inputs = self._compute(ordered, table_rows)
        drawing = {place: one for place, one in enumerate(ordered) if one.samples}
        is_masked = self._mask(drawing)
        shaping = {place: one for place, one in drawing.items() if is_shaped(one.request, one.position)}
        if shaping:
            self._draw_shaped(shaping, inputs)
        elif is_masked:
            self._draw_all(inputs)
        self._drawers = {one.request.id: place for place, one in drawing.items()}
        return self._receive(drawing, order)

    def _compute(self, ordered: Sequence[Scheduled], table_rows: Numbers) -> Inputs:
        decoding = sum(scheduled.tokens == 1 for scheduled in ordered)
        rows, sequences = sum(scheduled.tokens for scheduled in ordered), len(ordered)
        scores = any(scheduled.request.computes_whole_prompt for scheduled in ordered)
        # Not in graphs.
        adapted = self.adapters.rows((scheduled.request.chain.lora_name, scheduled.tokens) for scheduled in ordered)
        size = None if scores or adapted is not None else self._size_for(rows, sequences - decoding)
        if size is not None:
            inputs = self._send(self._counts(size), ordered, table_rows)
            self._graphs[size]()
            return inputs
        inputs = self._send(Counts(rows, sequences), ordered, table_rows)
        longest = max(scheduled.start + scheduled.tokens for scheduled in ordered)
        longest_prefill = max((one.tokens for one in ordered[decoding:]), default=0)
        step = self._step(inputs, longest, decoding, longest_prefill)
        hidden = self._run(inputs, step, adapted)
        if scores:
            last_rows = np.cumsum([scheduled.tokens for scheduled in ordered]) - 1
            prompt_logprobs.keep(self.model, ordered, hidden, last_rows.tolist())
        return inputs

    def _size_for(self, rows: int, prompts: int) -> Size | None:
        """The size of the smallest graph for such a step."""
        if prompts > MIXED_PROMPTS:
            return None
        place = size_for(self._sizes[prompts > 0], rows)
        return None if place is None else Size(prompts > 0, place)

    def _step(
        self, inputs: Inputs, longest: int, decoding: int, longest_prefill: int, mixed: Mixed | None = None
    ) -> TableStep:
        tables = self._tables.table[inputs.table_rows, : -(-longest // self.block_size)]
        arrays = inputs.positions, inputs.slots, tables, inputs.lengths, inputs.starts
        return TableStep(*arrays, decoding, len(inputs.positions) - decoding, longest_prefill, longest, mixed)

    def _run(self, inputs: Inputs, step: TableStep, adapted: AdaptedRows | None = None) -> Tensor:
        """The model and the draw; what the rows came to."""
        ids = inputs.token_ids
        ids = torch.where(ids < 0, self._drawn[(-1 - ids).clamp_(min=0)], ids)
        step = step._replace(plan=self.attention.plan(step, self.caches[0]))
        hidden = self.model.hidden(ids, step, self.caches, self.attention, adapted)
        self.model.logits(hidden[inputs.last_rows], out=self._logits[: len(inputs.last_rows)])
        self._draw_all(inputs)
        return hidden

    def _draw_all(self, inputs: Inputs) -> None:
        count = len(inputs.points)
        shapes = inputs.temperatures, inputs.top_ks, inputs.top_ps, inputs.min_ps
        self._draw(self._logits[:count], *shapes, inputs.points, self._drawn[:count])

    def _mask(self, drawing: Mapping[int, Scheduled]) -> bool:
        """Rule out what may not come next in constrained answers; return False if there are none."""
        places = list(drawing)
        bits = bits_of([one.request for one in drawing.values()])
        if bits:
            self._masks.apply(self._logits, {places[number]: of_request for number, of_request in bits.items()})
        return bool(bits)

    def _draw_shaped(self, shaping: Mapping[int, Scheduled], inputs: Inputs) -> None:
        """Once more, where clients add something to the logits: few do. Log probabilities are of those without."""
        places = torch.tensor(list(shaping)).to(self._logits.device)
        kept = self._logits[places]
        chosen = shaping.values()
        rows = shaped(kept, [one.request for one in chosen], [one.position for one in chosen])
        # Where nothing is left, every token would end the output too early: the model's own counts.
        self._logits[places] = torch.where(rows.isneginf().all(1, keepdim=True), kept, rows)
        self._draw_all(inputs)
        self._logits[places] = kept

    def _receive(self, drawing: Mapping[int, Scheduled], order: Sequence[int]) -> Finish:
        self._received.reverse()
        received = self._received[0][: len(order)]
        received.copy_(self._drawn[: len(order)], non_blocking=True)
        wait = self._accelerator.mark()
        logprobs: dict[int, TokenLogprobs] = {}
        if any(one.request.sampling.top_logprobs is not None for one in drawing.values()):
            wait()  # the next step's logits come into the same memory
            logprobs = self._logprobs(drawing, received.tolist())

        def finish() -> list[SampledToken | None]:
            wait()
            tokens = received.tolist()
            results: list[SampledToken | None] = [None] * len(order)
            for place in drawing:
                results[order[place]] = SampledToken(tokens[place], logprobs.get(place))
            return results

        return finish

    def _logprobs(self, drawing: Mapping[int, Scheduled], tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
        places = list(drawing)
        requests = [one.request for one in drawing.values()]
        found = logprobs_of(self._logits[places], [tokens[place] for place in places], requests)
        return {places[number]: logprobs for number, logprobs in found.items()}

    # ---- its inputs

    def _send(self, counts: Counts, ordered: Sequence[Scheduled], table_rows: Numbers) -> Inputs:
        """Send the arrays to the device, filled up with empty rows and sequences to the counts."""
        return self._staging.send(counts, self._arrays(counts, ordered, table_rows))

    def _arrays(self, counts: Counts, ordered: Sequence[Scheduled], table_rows: Numbers) -> dict[str, NDArray[Any]]:
        tokens = np.array([scheduled.tokens for scheduled in ordered], np.int64)
        begins = np.array([scheduled.start for scheduled in ordered], np.int64)
        ends = np.cumsum(tokens)
        of_row = np.repeat(np.arange(len(ordered)), tokens)
        positions = np.arange(len(of_row)) + (begins - ends + tokens)[of_row]
        blocks = self._tables.mirror[table_rows[of_row], positions // self.block_size].astype(np.int64)
        missing = counts.sequences - len(ordered)
        return {
            "token_ids": self._token_ids(ordered),
            "positions": positions,
            "slots": _and(
                blocks * self.block_size + positions % self.block_size, counts.rows - len(of_row), self._nowhere
            ),
            "table_rows": _and(table_rows, missing, self._tables.empty_row),
            "lengths": begins + tokens,
            "starts": _and(np.append(0, ends), missing, len(of_row)),
            "last_rows": ends - 1,
            "decoding": np.array([np.count_nonzero(tokens == 1)]),
            **_of_draws(ordered),
        }

    @property
    def _nowhere(self) -> int:
        return self.num_blocks * self.block_size

    def _token_ids(self, ordered: Sequence[Scheduled]) -> NDArray[Any]:
        decoding = [self._token_id(scheduled) for scheduled in ordered if scheduled.tokens == 1]
        parts = (scheduled.token_ids for scheduled in ordered[len(decoding) :])
        return np.concatenate((np.array(decoding, np.int64), *parts))

    def _token_id(self, scheduled: Scheduled) -> int:
        tokens = scheduled.request.chain.tokens
        if scheduled.start < len(tokens):
            return tokens[scheduled.start]
        return -1 - self._drawers[scheduled.request.id]  # the host does not know it yet

    # ---- before the first step

    @torch.inference_mode()
    def capture(self, size: Size) -> None:
        """Larger ones have to come first."""
        inputs = self._staging.fixed(self._counts(size))
        self._send(self._counts(size), (), np.zeros(0, np.int64))
        mixed = Mixed(inputs.decoding, MIXED_PROMPTS) if size.mixed else None
        decoding, longest_prefill = (0, size.rows) if size.mixed else (size.rows, 0)

        def run() -> None:
            self._run(inputs, self._step(inputs, self.limits.tokens, decoding, longest_prefill, mixed))

        run()  # compiles, and lets libraries take the memory they want
        self._graphs[size] = self._accelerator.capture(run, self._pool)
        self._sizes[size.mixed] = tuple(sorted(rows for mixed, rows in self._graphs if mixed == size.mixed))

    def _counts(self, size: Size) -> Counts:
        return Counts(size.rows, min(size.rows, self.limits.requests))


def _and(given: NDArray[Any], missing: int, otherwise: int) -> NDArray[Any]:
    return np.concatenate((given, np.full(missing, otherwise))) if missing else given


def _of_draws(ordered: Sequence[Scheduled]) -> dict[str, NDArray[Any]]:
    """The arrays that decide the tokens; they change nothing in rows that draw none."""
    samplings = [scheduled.request.sampling for scheduled in ordered]
    return {
        "temperatures": np.array([sampling.temperature for sampling in samplings]),
        "top_ks": np.array([min(sampling.top_k, MOST) for sampling in samplings]),
        "top_ps": np.array([sampling.top_p for sampling in samplings]),
        "min_ps": np.array([sampling.min_p for sampling in samplings]),
        "points": np.array(
            [
                0.0 if sampling.temperature < GREEDY_BELOW else uniform(sampling.seed, max(0, scheduled.position))
                for scheduled, sampling in zip(ordered, samplings, strict=True)
            ]
        ),
    }
