"""Attention against float64, over memory that is poisoned where nothing was stored, by tables that go on wrongly."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.paged import Attention, KvShape, LayerCache
from kernels.tables import TableStep
from tests.gpu.place import Place, backends
from tests.kernels.poison import poisoned
from tests.kernels.tables import as_mixed

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # tolerances, of 1 + the expected value
RATIOS = (1, 2, 4, 7, 8)  # query heads to a KV head
HEAD_DIMS = (64, 80, 128)
BLOCK_SIZES = (16, 32, 256)
KV_HEADS = 2
SPARE = 3  # extra columns in the tables, and padding rows and sequences in a graph
NOBODY = 10**6  # a block that is not there


class Shape(NamedTuple):
    dtype: torch.dtype
    ratio: int
    head_dim: int
    block_size: int

    def __str__(self) -> str:
        return (
            f"{str(self.dtype).removeprefix('torch.')}, {self.ratio * KV_HEADS} heads of {self.head_dim}, "
            f"{KV_HEADS} KV heads, blocks of {self.block_size}"
        )


class Batch(NamedTuple):
    """A batch: each sequence's length and how many of its tokens are rows; decoding sequences come first."""

    name: str
    spans: Sequence[tuple[int, int]]
    in_graph: bool = False  # the host counts nothing, and some rows and sequences are padding

    @property
    def decoding(self) -> int:
        return sum(rows == 1 for _, rows in self.spans)


BATCHES = (
    Batch("decode", [(length, 1) for length in (1, 2, 15, 16, 17, 0, 31, 100, 255, 256, 257, 1000, 2049, 0, 3000)]),
    Batch("decode, many", [(1 + 7 * number % 97, 1) for number in range(300)]),  # too many for it to cut them up
    Batch("decode, few and long", [(5003, 1), (0, 1), (700, 1)]),
    Batch("mixed", [(40, 1), (1, 1), (1025, 1), (70, 20), (33, 33), (600, 129), (1500, 7), (256, 256)]),
    Batch("prefill", [(2, 2), (300, 300), (2000, 64)]),
    Batch("prefill, few and long", [(5003, 16)]),
    Batch("mixed, in a graph", [(40, 1), (1, 1), (3000, 1), (70, 20), (33, 33), (1500, 7)], in_graph=True),
    Batch("decode, in a graph of mixed", [(40, 1), (5003, 1), (9, 1)], in_graph=True),
)
QUICK_BATCHES = (
    Batch("decode", [(1, 1), (17, 1), (0, 1), (40, 1)]),
    Batch("mixed", [(40, 1), (1, 1), (70, 20), (33, 33)]),
    Batch("mixed, in a graph", [(40, 1), (70, 20), (33, 33)], in_graph=True),
)


class Case(NamedTuple):
    """Inputs of one comparison, on the device."""

    queries: Tensor
    cache: LayerCache
    step: TableStep
    blocks: list[list[int]]  # of each sequence


class Error(NamedTuple):
    shape: Shape
    batch: str
    backend: str
    worst: float  # relative to the tolerance: above 1 it fails
    largest: float
    relative: float  # of all together


def shapes(place: Place) -> list[Shape]:
    """Each dtype with each head dimension and block size, and the ratios in turns."""
    if place.quick:
        return [Shape(torch.float32, 2, 64, 16), Shape(torch.bfloat16, 7, 80, 32)]
    wanted = list(product(HEAD_DIMS, BLOCK_SIZES))
    return [
        Shape(dtype, RATIOS[(3 * offset + number) % len(RATIOS)], *sizes)
        for offset, dtype in enumerate(DTYPES)
        for number, sizes in enumerate(wanted)
    ]


def jobs(place: Place) -> list[Callable[[Callable[[Any], None]], None]]:
    """One job per shape, with all backends and batches, since kernels are compiled per shape."""

    def job(shape: Shape) -> Callable[[Callable[[Any], None]], None]:
        def check(say: Callable[[Any], None]) -> None:
            for error in errors(place, shape):
                say(error)

        return check

    return [job(shape) for shape in shapes(place)]


@torch.inference_mode()
def errors(place: Place, shape: Shape) -> Iterator[Error]:
    loaded, _ = backends(place, KvShape(shape.dtype, shape.block_size, shape.head_dim))
    for number, batch in enumerate(place.size(BATCHES, QUICK_BATCHES)):
        case = case_of(place.device, shape, batch, seed=number)
        expected = reference(case, batch)
        for attention in loaded:
            yield error_of(attention, shape, batch, case, expected)


def error_of(attention: Attention[Any], shape: Shape, batch: Batch, case: Case, expected: Tensor) -> Error:
    with poisoned():
        found = attention.attend(case.queries, case.cache, case.step)
    found = found[: len(expected)].double()
    is_anybodys = torch.cat([torch.full((rows,), length > 0) for length, rows in batch.spans]).to(found.device)
    difference = (found - expected).abs()[is_anybodys]
    worst = float((difference / (1 + expected[is_anybodys].abs())).max()) / DTYPES[shape.dtype]
    if not bool(found.isfinite().all()):
        worst = float("nan")
    relative = float(difference.norm() / expected[is_anybodys].norm())
    return Error(shape, batch.name, attention.name, worst, float(difference.max()), relative)


def case_of(device: torch.device, shape: Shape, batch: Batch, seed: int) -> Case:
    generator = torch.Generator(device).manual_seed(seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(shape.dtype)

    counts = [-(-length // shape.block_size) for length, _ in batch.spans]
    numbers = list(range(sum(counts) + SPARE))
    random.Random(seed).shuffle(numbers)
    blocks = [[numbers.pop() for _ in range(count)] for count in counts]
    size = (sum(counts) + SPARE, shape.block_size, KV_HEADS, shape.head_dim)
    cache = LayerCache(*(torch.full(size, torch.nan, device=device, dtype=shape.dtype) for _ in range(2)))
    for own, (length, _) in zip(blocks, batch.spans, strict=True):
        for memory in cache:
            memory.flatten(0, 1)[slots_of(own, length, shape.block_size, device)] = noise(*(length, *size[2:]))
    rows, heads = sum(rows for _, rows in batch.spans) + SPARE * batch.in_graph, KV_HEADS * shape.ratio
    # Strided as a projection's output: keys and values lie between the queries of two rows.
    wide = torch.full((rows, heads + 2 * KV_HEADS, shape.head_dim), torch.nan, device=device, dtype=shape.dtype)
    wide[:, :heads] = noise(rows, heads, shape.head_dim)
    return Case(wide[:, :heads], cache, step_of(device, shape, batch, blocks), blocks)


def slots_of(blocks: Sequence[int], length: int, block_size: int, device: torch.device) -> Tensor:
    first = torch.tensor(blocks, dtype=torch.int64, device=device)[:, None] * block_size
    return (first + torch.arange(block_size, device=device)).flatten()[:length]


def step_of(device: torch.device, shape: Shape, batch: Batch, blocks: Sequence[Sequence[int]]) -> TableStep:
    width = max(map(len, blocks)) + SPARE
    tables = torch.full((len(blocks), width), NOBODY, dtype=torch.int32)
    tables[:, 1::2] = -1
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.int32)
    rows = [count for _, count in batch.spans]
    prefills = rows[batch.decoding :]
    nothing = torch.zeros(sum(rows), dtype=torch.int64, device=device)
    step = TableStep(
        positions=nothing,
        slots=nothing,
        tables=tables.to(device),
        lengths=torch.tensor([length for length, _ in batch.spans], dtype=torch.int32, device=device),
        starts=torch.tensor([0, *rows], device=device).cumsum(0, dtype=torch.int32),
        decoding=batch.decoding,
        prefilling=sum(prefills),
        longest_prefill=max(prefills, default=0),
        longest=width * shape.block_size,
    )
    return as_mixed(step, SPARE, SPARE) if batch.in_graph else step


def reference(case: Case, batch: Batch) -> Tensor:
    """Attention in float64, sequence by sequence; padding rows are 0."""
    rows = sum(rows for _, rows in batch.spans)
    results = torch.zeros_like(case.queries[:rows], dtype=torch.float64, memory_format=torch.contiguous_format)
    begin = 0
    for blocks, (length, rows) in zip(case.blocks, batch.spans, strict=True):
        if length:
            block_size = case.cache.keys.shape[1]
            slots = slots_of(blocks, length, block_size, results.device)
            keys, values = (memory.flatten(0, 1)[slots].double() for memory in case.cache)
            results[begin : begin + rows] = attended(case.queries[begin : begin + rows].double(), keys, values)
        begin += rows
    return results


def attended(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last rows of a sequence, each against the tokens up to its own."""
    rows, heads, head_dim = queries.shape
    length, kv_heads = keys.shape[:2]
    own = queries.view(rows, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("rkgd,tkd->rkgt", own, keys) / head_dim**0.5
    positions = torch.arange(length - rows, length, device=queries.device)
    later = torch.arange(length, device=queries.device) > positions[:, None]
    weights = scores.masked_fill(later[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("rkgt,tkd->rkgd", weights, values).reshape(rows, heads, head_dim)
