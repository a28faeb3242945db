"""The parts of a checkpoint's tensors that one rank holds."""

import torch
from torch import Tensor

from replica.model.config import ModelConfig
from replica.model.weights import Weights
from replica.parallel.shares import Share


class SharedWeights:
    """Reads only this rank's part of each tensor; `take` is given the shape of the part."""

    def __init__(self, weights: Weights, config: ModelConfig, share: Share) -> None:
        self._weights = weights
        self._share = share
        heads = share.part(config.num_heads)
        kv_heads = share.kv_heads(config)
        queries = _scaled(heads, config.head_dim), config.num_heads * config.head_dim
        keys = _scaled(kv_heads, config.head_dim), config.num_kv_heads * config.head_dim
        inner = share.part(config.intermediate_size), config.intermediate_size
        vocabulary = share.part(config.vocab_size), config.vocab_size
        self._outputs = {  # modules whose rows are divided: the part and the size of the whole
            "embed_tokens": vocabulary,
            "lm_head": vocabulary,
            "q_proj": queries,
            "k_proj": keys,
            "v_proj": keys,
            "gate_proj": inner,
            "up_proj": inner,
        }
        self._inputs = {"o_proj": queries, "down_proj": inner}  # whose columns are; results are summed over the ranks

    def take(self, name: str, *shape: int) -> Tensor:
        *_, module, kind = name.split(".")
        if module in self._outputs:
            part, whole = self._outputs[module]
            return self._weights.take_part(name, (whole, *shape[1:]), (part,))
        if module in self._inputs and kind == "bias":  # added once
            bias = self._weights.take(name, *shape)
            return torch.zeros_like(bias) if self._share.rank else bias
        if module in self._inputs:
            part, whole = self._inputs[module]
            return self._weights.take_part(name, (shape[0], whole), (slice(None), part))
        return self._weights.take(name, *shape)


def _scaled(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)
