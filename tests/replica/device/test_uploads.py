"""Tensors arrive whole, whatever their size is beside that of a piece, and no piece is written while it is read."""

from itertools import count

import pytest
import torch

from replica.device.accelerator import Wait
from replica.device.parts import Uploads
from tests.replica.device.hosts import HostAccelerator

PIECE = 64


class Noting(HostAccelerator):
    """Notes marks and waits, by the number of the mark."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._numbers = count()

    def mark(self) -> Wait:
        number = next(self._numbers)
        self.notes.append(f"mark {number}")
        return lambda: self.notes.append(f"wait {number}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 5), (PIECE,), (7, PIECE), (0, 4), (), (1,)])
def test_tensors_arrive(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    uploads = Uploads(HostAccelerator(), PIECE)
    for number in range(3):
        tensor = (torch.arange(torch.Size(shape).numel()) * 3 + number).reshape(shape).to(dtype)
        sent = uploads.send(tensor)
        assert torch.equal(sent, tensor) and sent.dtype == dtype and sent is not tensor


def test_a_piece_is_filled_only_after_what_was_in_it_has_left() -> None:
    accelerator = Noting()
    uploads = Uploads(accelerator, PIECE)
    uploads.send(torch.zeros(3 * PIECE, dtype=torch.uint8))
    uploads.send(torch.zeros(2, dtype=torch.uint8))
    assert accelerator.notes == ["mark 0", "mark 1", "wait 0", "mark 2", "wait 1", "mark 3"]
