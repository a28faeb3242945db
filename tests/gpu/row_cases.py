"""Norms, SwiGLU, rotary with its KV write, and copies of beginnings of blocks, against float32."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.adapters import ROOM, Table, Tiles, blank, change_of, cut
from kernels.paged import KvShape, LayerCache
from kernels.pointwise import Heads, Pointwise
from kernels.spans import Copy
from kernels.tables import TableStep
from tests.gpu.place import Place, chosen
from tests.kernels.poison import poisoned

# Relative to 1 + the expected value. Heads are rounded after the norm and the rotation; residuals before squaring.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
WIDTHS = (64, 112, 1001, 1024, 4096, 5120)
COUNTS = (1, 3, 129)
ROWS = 37
BLOCKS = (1, 5, 16, 32)  # their sizes
PRODUCTS = ((72, (128, 40, 40)), (1024, (2048, 1024, 1024)), (300, (520, 520)))  # inputs, and outputs by projection
EXACT = Pointwise()


class Error(NamedTuple):
    what: str
    dtype: torch.dtype
    worst: float


def jobs(place: Place) -> list[Callable[[Callable[[Any], None]], None]]:
    def job(dtype: torch.dtype) -> Callable[[Callable[[Any], None]], None]:
        def check(say: Callable[[Any], None]) -> None:
            for error in errors(place, dtype):
                say(error)

        return check

    return [job(dtype) for dtype in TOLERANCES]


@torch.inference_mode()
def errors(place: Place, dtype: torch.dtype) -> Iterator[Error]:
    torch.manual_seed(2)
    kernels = chosen(place, KvShape(dtype, 16, 64)).pointwise
    for what, cases in (
        ("norm, with and without residual", norms),
        ("SwiGLU", gates),
        ("rotary, with and without norms, and KV write", turns),
        ("copies", copies),
        ("adapters' changes, of one and many rows", changes),
    ):
        for found, expected in cases(place, kernels, dtype):
            yield Error(what, dtype, worst_of(found, expected, dtype))


def worst_of(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Above 1 is too much. Where nothing was to be written, nothing may be."""
    there = ~expected.isnan()
    if not torch.equal(there, ~found.isnan()):
        return float("nan")
    exact = expected[there].double()
    difference = (found[there].double() - exact).abs() / (1 + exact.abs())
    return float(difference.max()) / TOLERANCES[dtype] if difference.numel() else 0.0


Pairs = Iterator[tuple[Tensor, Tensor]]


def norms(place: Place, kernels: Pointwise, dtype: torch.dtype) -> Pairs:
    for width in place.size(WIDTHS, WIDTHS[:3]):
        for count in COUNTS:
            rows, delta = noise(place, dtype, count, width), noise(place, dtype, count, width)
            weight = (1 + noise(place, torch.float32, width) / 4).to(dtype)
            for added in (None, delta):
                with poisoned():
                    mine = kernels.add_norm(rows.clone(), added, weight, 1e-6)
                # The sum is rounded before it is squared, since the next layer reads it rounded.
                total = rows if added is None else rows + added
                yield mine[0], total.float()
                yield mine[1], EXACT.add_norm(total.float(), None, weight.float(), 1e-6)[1]


def gates(place: Place, kernels: Pointwise, dtype: torch.dtype) -> Pairs:
    for width in place.size(WIDTHS, WIDTHS[:3]):
        for count in COUNTS:
            gate_up = 3 * noise(place, dtype, count, 2 * width)
            with poisoned():
                mine = kernels.swiglu(gate_up.clone())
            yield mine, EXACT.swiglu(gate_up.float())


def turns(place: Place, kernels: Pointwise, dtype: torch.dtype) -> Pairs:
    for queries, keys, head_dim in ((4, 4, 64), (14, 2, 80), (16, 8, 128), (9, 3, 20)):
        qkv = noise(place, dtype, ROWS, (queries + 2 * keys) * head_dim)
        angles = torch.rand(ROWS, 1, head_dim // 2, device=place.device) * 6
        turn = torch.stack((angles.cos(), angles.sin()), dim=1).to(dtype)
        weights = tuple((1 + noise(place, torch.float32, head_dim) / 4).to(dtype) for _ in range(2))
        for norms_of in (None, (weights[0], weights[1])):
            heads = Heads(queries, keys, head_dim, norms_of)
            exact_norms = None if norms_of is None else (norms_of[0].float(), norms_of[1].float())
            for block_size in BLOCKS:
                mine, exact = (memory(place, kind, block_size, keys, head_dim) for kind in (dtype, torch.float32))
                step = writing(place, block_size)
                with poisoned():
                    turned = kernels.turn_and_store(qkv.clone(), heads, turn, mine, step)
                exact_heads = heads._replace(norms=exact_norms)
                yield turned, EXACT.turn_and_store(qkv.float(), exact_heads, turn.float(), exact, step)
                yield from zip(mine, exact, strict=True)


def copies(place: Place, kernels: Pointwise, dtype: torch.dtype) -> Pairs:
    """Copies of blocks in all layers. Their order matters: some sources become targets later."""
    wanted = [Copy(1, 2, 3), Copy(0, 1, 5), Copy(4, 5, 1), Copy(4, 6, 16)]
    for apart in (False, True):
        mine = layers(place, dtype, apart=apart)
        exact = [LayerCache(*(part.clone() for part in cache)) for cache in mine]
        kernels.copy(mine, wanted)
        EXACT.copy(exact, wanted)
        for found, expected in zip(mine, exact, strict=True):
            yield from ((part, other.float()) for part, other in zip(found, expected, strict=True))


def changes(place: Place, kernels: Pointwise, dtype: torch.dtype) -> Pairs:
    """Changes of adapters of odd and usual sizes, in rows that have them or not."""
    for width, columns in place.size(PRODUCTS, PRODUCTS[:1]):
        wholes = [adapter(place, width, columns, rank) for rank in (8, 64)]
        tables = []
        for kind in (dtype, torch.float32):
            table = Table(blank(1, 3, place.device)[0], even=8)
            made = [change_of(*converted(whole, dtype, kind)) for whole in wholes]
            for slot, change in enumerate(made, start=1):
                table.numbers[slot] = torch.tensor(table.put(slot, change))
            tables.append((table, made))
        for slots in ([1, -1, 2, 0, 2, 1, 1], [2] * 70 + [-1] * 9 + [1] * 500):
            rows, found = cut(np.array(slots, np.int32))
            tiles = Tiles(*(torch.from_numpy(array).to(place.device, torch.int32) for array in (rows, found)))
            inputs, product = noise(place, dtype, len(slots), width), noise(place, dtype, len(slots), sum(columns))
            exact = product.clone().float()
            with poisoned():
                kernels.adapt(inputs, product, tables[0][0], tiles, ROOM)
            EXACT.adapt(inputs.float(), exact, tables[1][0], tiles, ROOM)
            yield product, exact


# ---- inputs


Factors = list[tuple[Tensor, slice, slice]]


def adapter(place: Place, width: int, columns: Sequence[int], rank: int) -> tuple[Tensor, Factors]:
    """An adapter in float32 that changes every part."""
    ups, begin = [], 0
    for number, count in enumerate(columns):
        up = noise(place, torch.float32, count, rank) / rank**0.5
        ups.append((up, slice(rank * number, rank * (number + 1)), slice(begin, begin + count)))
        begin += count
    return noise(place, torch.float32, rank * len(columns), width) / width**0.5, ups


def converted(whole: tuple[Tensor, Factors], rounded: torch.dtype, kind: torch.dtype) -> tuple[Tensor, Factors]:
    down, ups = whole
    return down.to(rounded).to(kind), [(up.to(rounded).to(kind), inputs, outputs) for up, inputs, outputs in ups]


def noise(place: Place, dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(*size, device=place.device).to(dtype)


def memory(place: Place, dtype: torch.dtype, block_size: int, keys: int, head_dim: int) -> LayerCache:
    size = (-(-ROWS // block_size) + 2, block_size, keys, head_dim)
    return LayerCache(*(torch.full(size, torch.nan, device=place.device, dtype=dtype) for _ in range(2)))


def writing(place: Place, block_size: int) -> TableStep:
    """Slots in no order."""
    slots = torch.randperm((-(-ROWS // block_size) + 2) * block_size, device=place.device)[:ROWS]
    unused = torch.zeros(0, dtype=torch.int32, device=place.device)
    return TableStep(unused, slots, unused, unused, unused, ROWS, 0, 0, 0)


def layers(place: Place, dtype: torch.dtype, *, apart: bool) -> Sequence[LayerCache]:
    """Caches of all layers, in one piece as in a replica, or each in its own memory."""
    size = (3, 2, 7, 16, 2, 24)
    whole = noise(place, dtype, *size)
    parts = [[part.clone() for part in layer] if apart else list(layer) for layer in whole]
    return [LayerCache(*layer) for layer in parts]
