"""Compare attention and the steps around it with the device's peak, at the shapes of an 8B model."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.paged import Attention, KvShape, LayerCache
from kernels.pointwise import Heads
from kernels.tables import TableStep
from tests.gpu.ceilings import Ceilings, measured
from tests.gpu.place import Place, backends, chosen
from tests.gpu.report import Figures, Table
from tests.gpu.timing import seconds

TITLE = "kernels in bf16: attention of 32 heads, 8 KV heads of 128"
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
BATCHES, CONTEXTS = (1, 8, 32, 128), (512, 2048, 8192)
UNEVEN = {"127 x 1,024 and 1 x 32,768": [1024] * 127 + [32_768], "31 x 512 and 1 x 65,536": [512] * 31 + [65_536]}
MAX_TIMES = 1.3  # what reading the uneven ones takes at copy speed
LEAST = 70.0  # % of the copy bandwidth, at 128 x 2,048
ROTATED_BYTES = 256e6  # that calls read before one reads the same again: more than any cache has
MAX_SETS = 64
WIDTH, INNER, ROWS = 4096, 14_336, 8192
DRAWN, VOCABULARY = 128, 151_936


class Chunk(NamedTuple):
    """`rows` new tokens after `cached` ones."""

    rows: int
    cached: int = 0


PREFILLS = {"1 x 8,192": [Chunk(8192)], "4 x 2,048": [Chunk(2048)] * 4, "512 after 8,192 cached": [Chunk(512, 8192)]}


class Memory:
    """One layer's KV, and tables of sequences in it that share nothing until it is used up."""

    def __init__(self, place: Place, tokens: int, block_size: int) -> None:
        self.device = place.device
        self.block_size = block_size
        self.blocks = -(-tokens // block_size)
        keys, values = (self._random(self.blocks, block_size, KV_HEADS, HEAD_DIM) for _ in range(2))
        self.cache = LayerCache(keys, values)
        self._order = torch.randperm(self.blocks, device=place.device, dtype=torch.int32)

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=torch.bfloat16).normal_()

    def step(self, chunks: Sequence[Chunk], number: int) -> TableStep:
        """Prefills, or decodes where all have one row; the n-th such step has other blocks than those before."""
        lengths = [chunk.rows + chunk.cached for chunk in chunks]
        blocks = [-(-length // self.block_size) for length in lengths]
        width = max(blocks)
        firsts = torch.tensor([0, *blocks[:-1]], device=self.device).cumsum(0) + number * sum(blocks)
        places = firsts[:, None] + torch.arange(width, device=self.device)
        tables = self._order[places % self.blocks]
        rows = [chunk.rows for chunk in chunks]
        longest = max(rows)
        nothing = torch.zeros(sum(rows), dtype=torch.int64, device=self.device)
        return TableStep(
            positions=nothing,
            slots=nothing,
            tables=tables,
            lengths=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            starts=torch.tensor([0, *rows], device=self.device).cumsum(0, dtype=torch.int32),
            decoding=len(chunks) if longest == 1 else 0,
            prefilling=0 if longest == 1 else sum(rows),
            longest_prefill=0 if longest == 1 else longest,
            longest=width * self.block_size,
        )

    def queries(self, rows: int) -> Tensor:
        return self._random(rows, HEADS, HEAD_DIM)


@torch.inference_mode()
def run(place: Place, table: Table) -> None:
    most = measured(place)
    batches, contexts = place.size((BATCHES, CONTEXTS), ((1, 3), (40, 70)))
    memory = Memory(place, max(batches) * max(contexts), BLOCK)
    for attention in backends(place, KvShape(torch.bfloat16, BLOCK, HEAD_DIM))[0]:
        if attention.name != "torch" or place.quick:  # the last resort would only take time
            decodes(place, table, attention, memory, most)
            uneven(place, table, attention, memory, most)
            prefills(place, table, attention, memory, most)
    del memory
    pointwise(place, table, most)
    draws(place, table, most)


# ---- attention


def decodes(place: Place, table: Table, attention: Attention[Any], memory: Memory, most: Ceilings) -> None:
    batches, contexts = place.size((BATCHES, CONTEXTS), ((1, 3), (40, 70)))
    for batch in batches:
        for context in contexts:
            taken = batch * context * KV_HEADS * HEAD_DIM * 2 * 2
            sets = place.size(max(1, min(MAX_SETS, -(-int(ROTATED_BYTES) // taken))), 2)
            queries = memory.queries(batch)
            steps = [memory.step([Chunk(1, context - 1)] * batch, number) for number in range(sets)]
            calls = [decoding(attention, queries, memory, step) for step in steps]
            rates = [taken / s for s in seconds(place, calls, place.size(10, 1))]
            name = f"{attention.name}, decode {batch} x {context:,}, blocks of {memory.block_size}"
            least = LEAST * (batch * context == 128 * 2048)
            table.figure(name, *shares(rates, most.bandwidth), f"{Figures(rates).median / 1e9:,.0f} GB/s", least=least)


def decoding(attention: Attention[Any], queries: Tensor, memory: Memory, step: TableStep) -> Callable[[], object]:
    """One layer's work; the plan is made once for all of a step's layers."""
    planned = step._replace(plan=attention.plan(step, memory.cache))
    return partial(attention.attend, queries, memory.cache, planned)


def uneven(place: Place, table: Table, attention: Attention[Any], memory: Memory, most: Ceilings) -> None:
    """One long sequence among many short ones."""
    for name, lengths in place.size(UNEVEN, {"3 x 20 and 1 x 70": [20] * 3 + [70]}).items():
        taken = sum(lengths) * KV_HEADS * HEAD_DIM * 2 * 2
        queries = memory.queries(len(lengths))
        step = memory.step([Chunk(1, length - 1) for length in lengths], 0)
        times = seconds(place, [decoding(attention, queries, memory, step)], place.size(10, 1))
        what = f"{attention.name}, decode {name}, blocks of {memory.block_size}"
        least = MAX_TIMES * (len(lengths) == 128)
        table.figure(what, [s * most.bandwidth / taken for s in times], "times reading at copy speed", most=least)


def prefills(place: Place, table: Table, attention: Attention[Any], memory: Memory, most: Ceilings) -> None:
    for name, chunks in place.size(PREFILLS, {"2 x 30": [Chunk(30)] * 2, "5 after 40": [Chunk(5, 40)]}).items():
        seen = sum(chunk.rows * chunk.cached + chunk.rows * (chunk.rows + 1) // 2 for chunk in chunks)
        queries = memory.queries(sum(chunk.rows for chunk in chunks))
        call = partial(attention.attend, queries, memory.cache, memory.step(chunks, 0))
        rates = [4 * HEADS * HEAD_DIM * seen / s for s in seconds(place, [call], place.size(10, 1), graph=False)]
        what = f"{attention.name}, prefill {name}, blocks of {memory.block_size}"
        values = [100 * rate / most.product for rate in rates]
        table.figure(what, values, "% of the product", f"{Figures(rates).median / 1e12:.3g} TFLOP/s")


def shares(rates: Sequence[float], bandwidth: float) -> tuple[list[float], str]:
    return [100 * rate / bandwidth for rate in rates], "% of the copy bandwidth"


# ---- what is beside it


def pointwise(place: Place, table: Table, most: Ceilings) -> None:
    kernels = chosen(place, KvShape(torch.bfloat16, BLOCK, HEAD_DIM)).pointwise
    rows, width, inner = place.size((ROWS, WIDTH, INNER), (12, 64, 96))
    memory = Memory(place, rows, BLOCK)
    step = memory.step([Chunk(rows)], 0)._replace(slots=torch.randperm(rows, device=place.device))
    heads = Heads(HEADS, KV_HEADS, HEAD_DIM)
    values = memory.queries(rows).flatten(1)[:, :width].contiguous()
    delta, weight = values.clone(), torch.ones(width, device=place.device, dtype=torch.bfloat16)
    gate_up = torch.empty(rows, 2 * inner, device=place.device, dtype=torch.bfloat16).normal_()
    qkv = torch.empty(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=place.device, dtype=torch.bfloat16).normal_()
    angles = torch.rand(rows, 1, HEAD_DIM // 2, device=place.device)
    turn = torch.stack((angles.cos(), angles.sin()), dim=1).bfloat16()
    works: dict[str, tuple[Callable[[], object], int]] = {
        f"norm with residual, {rows:,} x {width:,}": (
            partial(kernels.add_norm, values, delta, weight, 1e-6),
            4 * values.nbytes,
        ),
        f"SwiGLU, {rows:,} x {inner:,}": (partial(kernels.swiglu, gate_up), gate_up.nbytes * 3 // 2),
        f"rotary and KV write, {rows:,} rows": (
            partial(kernels.turn_and_store, qkv, heads, turn, memory.cache, step),
            2 * qkv.nbytes,
        ),
    }
    for name, (call, taken) in works.items():
        rates = [taken / s for s in seconds(place, [call], place.size(10, 1))]
        speed = f"{Figures(rates).median / 1e9:,.0f} GB/s"
        table.figure(f"{kernels.name}, {name}", *shares(rates, most.bandwidth), speed)


def draws(place: Place, table: Table, most: Ceilings) -> None:
    """Each row is read once at least: that is what a draw is held against."""
    draw = chosen(place, KvShape(torch.bfloat16, BLOCK, HEAD_DIM)).draw
    most_rows, vocabulary = place.size((DRAWN, VOCABULARY), (3, 500))
    wishes = (
        ("greedy", 0.0, 0, 1.0),
        ("temperature", 0.6, 0, 1.0),
        ("top_p 0.9", 0.6, 0, 0.9),
        ("top_k 50, top_p 0.9", 0.6, 50, 0.9),
    )
    for rows, (name, temperature, top_k, top_p) in product((1, most_rows), wishes):
        logits = torch.empty(rows, vocabulary, device=place.device).normal_(0, 2)
        points = torch.rand(rows, device=place.device, dtype=torch.float64)
        out = torch.zeros(rows, device=place.device, dtype=torch.int64)
        shape = (
            torch.full((rows,), temperature, device=place.device),
            torch.full((rows,), top_k, device=place.device, dtype=torch.int32),
            torch.full((rows,), top_p, device=place.device),
            torch.zeros(rows, device=place.device),
        )
        taken = seconds(place, [partial(draw, logits, *shape, points, out)], place.size(10, 1))
        times = f"{most.bandwidth * Figures(taken).median / logits.nbytes:.1f} times what reading takes at copy speed"
        table.figure(f"draw of {rows} x {vocabulary:,}, {name}", [s * 1e6 for s in taken], "us", times)
