"""Draws against float64: the same token, or one so near the point that only rounding lies between."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import sampling
from kernels.paged import KvShape
from kernels.sampling import GREEDY_BELOW
from tests.gpu.place import Place, chosen

VOCABULARIES = (32_000, 151_936)
ROWS = 48
NEAR = 1e-4  # of the whole weight
SHAPES = ((0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.6, 50, 0.95, 0.0), (1.3, 1, 1.0, 0.0))
MORE = ((1.0, 0, 1.0, 0.1), (0.3, 5000, 0.5, 0.0), (2.0, 10**9, 0.999, 1e-4), (1.0, 3, 0.01, 0.0))


class Inputs(NamedTuple):
    logits: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    points: Tensor


class Drawn(NamedTuple):
    vocabulary: int
    rows: int
    equal: int  # to the reference's
    explained: int  # equal, or nearer than NEAR
    worst: float  # distance, of the whole weight


def jobs(place: Place) -> list[Callable[[Callable[[Any], None]], None]]:
    def job(vocabulary: int) -> Callable[[Callable[[Any], None]], None]:
        return lambda say: say(drawn(place, vocabulary))

    return [job(vocabulary) for vocabulary in place.size(VOCABULARIES, (700, 5000))]


@torch.inference_mode()
def drawn(place: Place, vocabulary: int) -> Drawn:
    inputs = inputs_of(place, vocabulary)
    found, expected = (torch.full((len(inputs.points),), -1, device=place.device) for _ in range(2))
    chosen(place, KvShape(torch.bfloat16, 16, 64)).draw(*inputs, found)
    sampling.draw(*inputs, expected)
    far = [0.0 if found[row] == expected[row] else distance(inputs, row, int(found[row])) for row in range(len(found))]
    near = sum(one <= NEAR for one in far)
    return Drawn(vocabulary, len(found), int((found == expected).sum()), near, max(far))


def inputs_of(place: Place, vocabulary: int) -> Inputs:
    """Inputs with flat and steep rows, rows with ties, and rows of a broken model (NaN, infinities)."""
    torch.manual_seed(vocabulary)
    rows = place.size(ROWS, 18)
    steepness = torch.linspace(0.1, 8, rows, device=place.device)
    logits = torch.randn(rows, vocabulary, device=place.device) * steepness[:, None]
    logits[1::5] = logits[1::5].round()
    logits[3, vocabulary // 2] = torch.nan
    logits[5, 7] = torch.inf
    logits[6] = -torch.inf
    shapes = [(*SHAPES, *MORE)[row % (len(SHAPES) + len(MORE))] for row in range(rows)]
    temperatures, top_ks, top_ps, min_ps = zip(*shapes, strict=True)
    return Inputs(
        logits,
        torch.tensor(temperatures, device=place.device),
        torch.tensor(top_ks, dtype=torch.int32, device=place.device),
        torch.tensor(top_ps, device=place.device),
        torch.tensor(min_ps, device=place.device),
        torch.rand(rows, dtype=torch.float64, device=place.device),
    )


def distance(inputs: Inputs, row: int, token: int) -> float:
    """Distance from the point to the token's share of the weights; infinite if the token may not be drawn."""
    logits, temperature = inputs.logits[row].double(), float(inputs.temperatures[row])
    if temperature < GREEDY_BELOW or not bool(logits.max().isfinite()) or not 0 <= token < len(logits):
        return float("inf")
    weights = kept(((logits - logits.max()) / temperature).exp(), inputs, row)
    sums, own = weights.cumsum(0), float(weights[token])
    if not own:
        return float("inf")
    point, end = float(inputs.points[row] * sums[-1]), float(sums[token])
    return max(0.0, end - own - point, point - end) / float(sums[-1])


def kept(weights: Tensor, inputs: Inputs, row: int) -> Tensor:
    """Weights after `top_k`, `min_p` and `top_p`, applied in this order."""
    top_k, top_p = int(inputs.top_ks[row]), float(inputs.top_ps[row])
    if 0 < top_k < len(weights):
        weights = weights.masked_fill(weights < weights.topk(top_k).values[-1], 0)
    weights = weights.masked_fill(weights < float(inputs.min_ps[row]), 0)
    if top_p < 1:
        ordered = weights.sort(descending=True).values
        sums = ordered.cumsum(0)
        last = min(int((sums < top_p * sums[-1]).sum()), len(ordered) - 1)
        weights = weights.masked_fill(weights < ordered[last], 0)
    return weights
