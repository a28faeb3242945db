"""Matrix products with constant weights, packed once for the CPU, which saves a third of a decoding step.

oneDNN makes code of about a megabyte for every number of rows that it meets with a matrix, and keeps it. So rows are
filled up with zeros to one of SIZES, and many rows are computed TILE by TILE.

In float32 a row's result of a packed product is the same to the last bit, whatever rows stand beside it (decision
0009). A single row would go another way through oneDNN: there no size is 1.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Linear: TypeAlias = Callable[[Tensor], Tensor]

TILE = 512
SIZES = (2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, TILE)


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x -> x @ weight.T + bias for x of [rows, inputs]; the caller may drop the weight afterwards."""
    if weight.device.type != "cpu" or not can_pack(weight.dtype):
        return lambda rows: functional.linear(rows, weight, bias)
    sizes = SIZES if weight.dtype == torch.float32 else (1, *SIZES)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def product(rows: Tensor) -> Tensor:
        size = sizes[bisect_left(sizes, len(rows))]
        enough = functional.pad(rows, (0, 0, 0, size - len(rows))) if size > len(rows) else rows
        multiplied: Tensor = torch.ops.mkldnn._linear_pointwise(enough, packed, bias, "none", [], "")
        return multiplied[: len(rows)]

    return lambda rows: tiled(product, rows)


def tiled(compute: Linear, rows: Tensor) -> Tensor:
    """Compute rows on a CPU so many at a time that what is between two products stays in the processor's cache."""
    if rows.device.type != "cpu" or len(rows) <= TILE:
        return compute(rows)
    return torch.cat([compute(tile) for tile in rows.split(TILE)])


def can_pack(dtype: torch.dtype) -> bool:
    """Tell whether torch has oneDNN and the processor supports this type."""
    operations = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operations, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(operations._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(operations._is_mkldnn_fp16_supported())
    return dtype == torch.float32
