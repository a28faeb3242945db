"""Matrix products with weights that stay: packed once for the CPU, where that saves a third of a decoding step.

In float32 a row's result of a packed product is the same to the last bit, whatever rows stand beside it, from MIN_ROWS
rows on (decision 0009): a single row would go another way through oneDNN.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Linear: TypeAlias = Callable[[Tensor], Tensor]

MIN_ROWS = 2


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x -> x @ weight.T + bias, for x of [rows, inputs]; the weight may be given up when this has been made."""
    if weight.device.type != "cpu" or not can_pack(weight.dtype):
        return lambda rows: functional.linear(rows, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def product(rows: Tensor) -> Tensor:
        missing = MIN_ROWS - len(rows) if rows.dtype == torch.float32 else 0
        enough = functional.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows
        multiplied: Tensor = torch.ops.mkldnn._linear_pointwise(enough, packed, bias, "none", [], "")
        return multiplied[: len(rows)]

    return product


def can_pack(dtype: torch.dtype) -> bool:
    """Whether torch has been built with oneDNN, and the processor computes this type at all."""
    operations = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operations, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(operations._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(operations._is_mkldnn_fp16_supported())
    return dtype == torch.float32
