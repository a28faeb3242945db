"""The models: Llama, Mistral, Qwen2 and Qwen3 are one transformer, and `ModelConfig` says where they differ.

Rows are tokens of a step (`kernels.paged`); everything here treats each row alone, but for attention.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear import Linear, linear
from kernels.paged import Attention, LayerCache, Step
from replica.model.config import ModelConfig
from replica.model.rope import rotate, rotation


class Source(Protocol):
    """Where weights come from: by the names that transformers gives them."""

    def take(self, name: str, *shape: int) -> Tensor: ...


class Transformer:
    """`hidden` runs the layers; `logits` ends it for the rows that are to be sampled."""

    def __init__(self, config: ModelConfig, weights: Source, max_model_len: int) -> None:
        self.config = config
        width, vocabulary = config.hidden_size, config.vocab_size
        self._embedding = weights.take("model.embed_tokens.weight", vocabulary, width)
        self.dtype = self._embedding.dtype
        self._layers = [Layer(config, weights, f"model.layers.{index}.") for index in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", width)
        # A packed copy of its own, where the embedding is shared: a packed matrix has no rows to look up.
        head = self._embedding if config.tie_word_embeddings else weights.take("lm_head.weight", vocabulary, width)
        self._head = linear(head)
        self._rotation = rotation(config, max_model_len).to(self.dtype)

    def hidden(self, token_ids: Tensor, step: Step, caches: Sequence[LayerCache], attention: Attention) -> Tensor:
        """What the last layer makes of the rows; their KV is in the caches then."""
        rows = self._embedding[token_ids]
        turn = self._rotation[step.positions]
        for layer, cache in zip(self._layers, caches, strict=True):
            rows = layer.run(rows, turn, step, cache, attention)
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] in float32."""
        return self._head(_normed(hidden, self._norm, self.config.rms_norm_eps)).float()

    def new_caches(self, num_blocks: int, block_size: int) -> list[LayerCache]:
        """KV memory for all layers, zero: what was never written is read too, and multiplied by zero."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        return [LayerCache(_zeros(shape, self.dtype), _zeros(shape, self.dtype)) for _ in range(self.config.num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that the system gives when it is first written: torch's own zeros would take all of it at once."""
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(dtype)


class Layer:
    """Attention and MLP, each behind a norm and added to what came in; `name` begins its weights' names."""

    def __init__(self, config: ModelConfig, weights: Source, name: str) -> None:
        self._config = config
        width, inner = config.hidden_size, config.intermediate_size
        self._queries = config.num_heads * config.head_dim
        self._keys = config.num_kv_heads * config.head_dim
        self._input_norm = weights.take(f"{name}input_layernorm.weight", width)
        self._post_norm = weights.take(f"{name}post_attention_layernorm.weight", width)
        projections = {"q_proj": self._queries, "k_proj": self._keys, "v_proj": self._keys}
        self._qkv = _joined(weights, f"{name}self_attn.", projections, width, biased=config.qkv_bias)
        output = {"o_proj": width}
        self._output = _joined(weights, f"{name}self_attn.", output, self._queries, biased=config.output_bias)
        self._gate_up = _joined(
            weights, f"{name}mlp.", {"gate_proj": inner, "up_proj": inner}, width, biased=config.mlp_bias
        )
        self._down = _joined(weights, f"{name}mlp.", {"down_proj": width}, inner, biased=config.mlp_bias)
        self._qk_norms: tuple[Tensor, Tensor] | None = None
        if config.qk_norm:
            head_dim = config.head_dim
            self._qk_norms = (
                weights.take(f"{name}self_attn.q_norm.weight", head_dim),
                weights.take(f"{name}self_attn.k_norm.weight", head_dim),
            )

    def run(self, rows: Tensor, turn: Tensor, step: Step, cache: LayerCache, attention: Attention) -> Tensor:
        eps = self._config.rms_norm_eps
        rows = rows + self._attend(_normed(rows, self._input_norm, eps), turn, step, cache, attention)
        gate, up = self._gate_up(_normed(rows, self._post_norm, eps)).chunk(2, dim=-1)
        return rows + self._down(_silu(gate).mul_(up))

    def _attend(self, rows: Tensor, turn: Tensor, step: Step, cache: LayerCache, attention: Attention) -> Tensor:
        head_dim = self._config.head_dim
        projected = self._qkv(rows).split((self._queries, self._keys, self._keys), dim=-1)
        queries, keys, values = (part.unflatten(-1, (-1, head_dim)) for part in projected)
        if self._qk_norms is not None:
            queries = _normed(queries, self._qk_norms[0], self._config.rms_norm_eps)
            keys = _normed(keys, self._qk_norms[1], self._config.rms_norm_eps)
        attention.store(rotate(keys, turn), values, cache, step)
        return self._output(attention.attend(rotate(queries, turn), cache, step).flatten(1))


def _joined(weights: Source, name: str, outputs: dict[str, int], inputs: int, *, biased: bool) -> Linear:
    """Several projections of the same rows as one product."""
    matrices = [weights.take(f"{name}{part}.weight", size, inputs) for part, size in outputs.items()]
    biases = [weights.take(f"{name}{part}.bias", size) for part, size in outputs.items()] if biased else []
    return linear(torch.cat(matrices), torch.cat(biases) if biases else None)


def _normed(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, computed in float32 whatever the type."""
    return functional.rms_norm(rows, weight.shape, weight, eps)


def _silu(gate: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)). torch's own rounds the ends of what a thread computes otherwise, and cuts rows there."""
    if gate.dtype != torch.float32:
        return functional.silu(gate)
    return gate / gate.neg().exp_().add_(1)
