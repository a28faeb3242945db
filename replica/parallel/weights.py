"""One rank's share of a model, loaded: it reads the parts of a checkpoint's tensors that it holds."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels.pointwise import Pointwise
from replica.config import EngineConfig
from replica.model.config import ModelConfig
from replica.model.ranks import Ranks
from replica.model.weights import Weights
from replica.parallel.shares import WHOLE, Share, parts_of
from replica.transformer import Transformer


def load_share(
    config: EngineConfig,
    model_config: ModelConfig,
    share: Share,
    ranks: Ranks,
    pointwise: Pointwise | None = None,
    send: Callable[[Tensor], Tensor] | None = None,
) -> Transformer:
    """Load this rank's share of the model, and of the adapters that are named at the start."""
    folder, dtype = Path(config.model_path), getattr(torch, config.dtype)
    with Weights(folder, dtype, send, shows_progress=not share.rank) as weights:
        source = weights if share == WHOLE else SharedWeights(weights, model_config, share)
        model = Transformer(model_config, source, config.max_model_len, pointwise, ranks)
        weights.finish()
    model.adapters.load_named(config)
    return model


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
