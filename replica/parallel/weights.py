"""The parts of a checkpoint's tensors that one rank holds."""

import torch
from torch import Tensor

from replica.model.config import ModelConfig
from replica.model.weights import Weights
from replica.parallel.shares import Share, parts_of


class SharedWeights:
    """Reads only this rank's part of each tensor; `take` is given the shape of the part."""

    def __init__(self, weights: Weights, config: ModelConfig, share: Share) -> None:
        self._weights = weights
        self._share = share
        self._rows, self._columns = parts_of(config, share)

    def take(self, name: str, *shape: int) -> Tensor:
        *_, module, kind = name.split(".")
        if module in self._rows:
            part, whole = self._rows[module]
            return self._weights.take_part(name, (whole, *shape[1:]), (part,))
        if module in self._columns and kind == "bias":  # added once
            bias = self._weights.take(name, *shape)
            return torch.zeros_like(bias) if self._share.rank else bias
        if module in self._columns:
            part, whole = self._columns[module]
            return self._weights.take_part(name, (shape[0], whole), (slice(None), part))
        return self._weights.take(name, *shape)
