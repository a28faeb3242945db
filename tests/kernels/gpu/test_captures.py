"""Every graph of a real model can be captured: nothing in such a step asks the device for a number.

The tensors have the model's shapes and no data (torch's device `meta`), so whoever asks fails, as in a capture.
"""

from typing import Any

import pytest

pytest.importorskip("triton", reason="there is no Triton here: see `make triton-check`")

import torch
from torch import Tensor

from kernels.gpu.attention import TritonAttention
from kernels.gpu.pointwise import TritonPointwise
from kernels.gpu.sampling import draw
from kernels.paged import LayerCache
from replica.device.build import capture_all, layers_of, new_caches, sizes_of
from replica.device.runner import DeviceRunner
from replica.device.sizes import Limits
from replica.model.config import parse_config
from replica.transformer import Transformer
from tests.kernels.gpu.device import needs_compiler
from tests.kernels.gpu.driver import noted_compiles
from tests.kernels.gpu.test_compiled import H200
from tests.replica.device.hosts import HostAccelerator
from tests.replica.shapes import LLAMA31_8B, QWEN3_06B

pytestmark = needs_compiler

LIMITS = Limits(rows=8192, requests=256, tokens=8192, adapters=4)
BLOCKS, BLOCK_SIZE = 10_000, 16


class NoData(HostAccelerator):
    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta")


class NoWeights:
    def take(self, _: str, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")


class Asking(TritonAttention):
    """Wants to know the longest sequence."""

    def plan(self, step: Any, cache: LayerCache) -> Tensor | None:
        int(step.lengths.max())
        return super().plan(step, cache)


def runner_of(shape: dict[str, Any], attention: TritonAttention) -> DeviceRunner:
    model = Transformer(parse_config(shape, "the shape"), NoWeights(), LIMITS.tokens, TritonPointwise())
    caches = layers_of(new_caches(model, BLOCKS + 1, BLOCK_SIZE))
    return DeviceRunner(model, attention, draw, caches, LIMITS, NoData())


@pytest.mark.parametrize("shape", [QWEN3_06B, LLAMA31_8B], ids=["Qwen3-0.6B", "Llama-3.1-8B"])
def test_no_step_of_a_graph_asks_the_device(shape: dict[str, Any]) -> None:
    with noted_compiles() as compiles:
        runner = runner_of(shape, TritonAttention(H200))
        sizes = sizes_of(LIMITS, runner.model.config)
        capture_all(runner, sizes)
    assert len(runner.graphs) == len(sizes) > 40
    assert compiles


def test_a_kernel_that_asks_would_be_noticed() -> None:
    with noted_compiles(), pytest.raises(RuntimeError, match="meta"):
        capture_all(runner := runner_of(QWEN3_06B, Asking(H200)), sizes_of(LIMITS, runner.model.config))
