"""Tensors arrive whole, whatever their size is beside that of a piece, and no piece is written while it is read."""

import pytest
import torch

from replica.device.accelerator import Uploads
from tests.replica.device.hosts import HostAccelerator

PIECE = 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 5), (PIECE,), (7, PIECE), (0, 4), (), (1,)])
def test_tensors_arrive(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    uploads = Uploads(HostAccelerator(), PIECE)
    for number in range(3):
        tensor = (torch.arange(torch.Size(shape).numel()) * 3 + number).reshape(shape).to(dtype)
        sent = uploads.send(tensor)
        assert torch.equal(sent, tensor) and sent.dtype == dtype and sent is not tensor
