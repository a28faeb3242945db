"""Peak figures of the device, the reference for other sections' percentages."""

from functools import partial
from typing import NamedTuple

import torch

from tests.gpu.place import Place
from tests.gpu.report import Figures, Table
from tests.gpu.timing import seconds

TITLE = "ceilings"


class Ceilings(NamedTuple):
    copied: list[float]  # bytes read and written, per second
    multiplied: list[float]  # bfloat16 operations per second

    @property
    def bandwidth(self) -> float:
        return Figures(self.copied).median

    @property
    def product(self) -> float:
        return Figures(self.multiplied).median


def run(place: Place, table: Table) -> None:
    found = measured(place, rounds=20)
    size = place.size("1 GiB", "1 MiB")
    table.figure(f"copy of {size}, read and written", [rate / 1e9 for rate in found.copied], "GB/s")
    table.figure(f"bf16 product of {place.size(8192, 64)} cubed", [rate / 1e12 for rate in found.multiplied], "TFLOP/s")


def measured(place: Place, rounds: int = 8) -> Ceilings:
    """Measure with random data: products of zeros take less power, and are faster."""
    count = place.size(2**29, 2**19)
    source = torch.empty(count, device=place.device, dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    copied = [4 * count / s for s in seconds(place, [partial(target.copy_, source)], rounds, graph=False)]
    del source, target
    side = place.size(8192, 64)
    left, right, result = (torch.empty(side, side, device=place.device, dtype=torch.bfloat16) for _ in range(3))
    left.normal_()
    right.normal_()
    product = partial(torch.mm, left, right, out=result)
    return Ceilings(copied, [2 * side**3 / s for s in seconds(place, [product], rounds, graph=False)])
