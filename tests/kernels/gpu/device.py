"""Device of the kernel tests: a GPU, or a CPU in Triton's interpreter, which has to be asked for beforehand."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
# The interpreter has no products of bfloat16; one that compiles has.
HALF = torch.float16 if INTERPRETED else torch.bfloat16

needs_device = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="without a GPU it takes TRITON_INTERPRET=1, as in `make triton-check`"
)
needs_compiler = pytest.mark.skipif(INTERPRETED, reason="what is interpreted is not compiled")

if INTERPRETED:
    from tests.kernels.gpu.interpreter import hasten

    hasten()
