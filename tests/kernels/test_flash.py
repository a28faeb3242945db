"""FlashAttention is called by names, once a step; an operator that cannot be called so is refused beforehand."""

import pytest
import torch

from kernels.gpu.flash import FlashAttention3
from tests.kernels.flashes import NEW, OTHER, operator
from tests.kernels.sequences import Shape
from tests.kernels.tables import both

SHAPE = Shape(head_dim=16)
MIXED = [(40, 1), (9, 1), (30, 4), (11, 11), (6, 1)]
DECODES = [(40, 1), (9, 1)]
PROMPTS = [(30, 4), (11, 11)]
steps = pytest.mark.parametrize(("spans", "decoding"), [(MIXED, 2), (DECODES, 2), (PROMPTS, 0)])


def fwd() -> FlashAttention3:
    return FlashAttention3(torch.ops._vllm_fa3_C.fwd)


@steps
@pytest.mark.parametrize("schema", [NEW, OTHER])
def test_flash3_computes_a_step_in_one_call(schema: str, spans: list[tuple[int, int]], decoding: int) -> None:
    with operator(schema) as calls:
        mine, expected = both(fwd(), SHAPE, spans, decoding)
    torch.testing.assert_close(mine, expected, atol=4e-6, rtol=4e-6)
    assert len(calls) == 1 and ("cu_seqlens_q" in calls[0]) == (spans is not DECODES)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (NEW.replace("seqused_k,", "cache_seqlens,"), "does not take seqused_k"),
        (NEW.replace("int sm_margin", "int sm_margin, int mystery"), "wants mystery"),
    ],
)
def test_an_operator_that_cannot_be_called_is_refused(schema: str, reason: str) -> None:
    with operator(schema), pytest.raises(RuntimeError, match=reason):
        fwd()
