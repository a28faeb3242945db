"""Environment of a section: its device, kernels and deadline."""

import os
import time
from typing import Any, NamedTuple, TypeVar

import torch

from kernels.backends import ORDER, choose
from kernels.paged import Attention, KvShape
from kernels.pointwise import Pointwise
from replica.device.accelerator import Accelerator
from replica.device.build import kernels_for
from replica.device.runner import Draw

T = TypeVar("T")


class Place(NamedTuple):
    device: torch.device
    quick: bool  # sizes that only show that everything runs
    until_s: float  # by time.monotonic

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def size(self, real: T, quick: T) -> T:
        return quick if self.quick else real

    @property
    def at_once(self) -> int:
        """Processes that check side by side: most of their time is the compiler's."""
        return max(1, min(12, (os.cpu_count() or 1) - 2)) if self.is_gpu else 2

    @property
    def threads(self) -> int:
        """Threads of each of the `at_once` processes."""
        return 1 if self.quick else 2

    def accelerator(self) -> Accelerator:
        if self.is_gpu:
            return Accelerator()
        from tests.replica.device.hosts import HostAccelerator

        return HostAccelerator()


class Kernels(NamedTuple):
    attention: Attention[Any]
    pointwise: Pointwise
    draw: Draw


def chosen(place: Place, shape: KvShape) -> Kernels:
    """Kernels that a replica would choose here; without a GPU, plain substitutes."""
    if not place.is_gpu:
        return _plain()
    choice = choose("auto", "cuda", shape)
    return Kernels(choice.attention, *kernels_for(choice, shape))


def unusable(place: Place, shape: KvShape) -> dict[str, str]:
    """Attention backends that do not work here, with their errors."""
    passed = {}
    for backend in ORDER if place.is_gpu else ():
        if backend.device == "cuda":
            try:
                choose(backend.name, "cuda", shape)
            except ValueError as error:
                passed[backend.name] = str(error)
    return passed


def _plain() -> Kernels:
    from kernels.plain import PlainAttention
    from kernels.sampling import draw

    return Kernels(PlainAttention(), Pointwise(), draw)
