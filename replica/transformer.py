"""The models: Llama, Mistral, Qwen2 and Qwen3 are one transformer, and `ModelConfig` says where they differ.

Rows are tokens of a step (`kernels.paged`); everything here treats each row alone, but for attention.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.linear import Linear, linear, tiled
from kernels.paged import AnyStep, Attention, LayerCache
from kernels.pointwise import Heads, Pointwise
from replica.lora.adapter import Adapters, Changing, Place
from replica.model.config import ModelConfig

ROTATION_BYTES = 4  # a float32
MAX_ROTATION_BYTES = 8_000_000_000  # some ten million positions of the largest heads


class Source(Protocol):
    """A source of weights, by the names that transformers gives them."""

    def take(self, name: str, *shape: int) -> Tensor: ...


class Transformer:
    """`hidden` runs the layers; `logits` ends it for the rows that are to be sampled."""

    def __init__(
        self, config: ModelConfig, weights: Source, max_model_len: int, pointwise: Pointwise | None = None
    ) -> None:
        self.config = config
        self.pointwise = pointwise or Pointwise()
        width, vocabulary = config.hidden_size, config.vocab_size
        self._embedding = weights.take("model.embed_tokens.weight", vocabulary, width)
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self._layers = [Layer(config, weights, index, self.pointwise) for index in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", width)
        # A packed copy of its own, where the embedding is shared: a packed matrix has no rows to look up.
        head = self._embedding if config.tie_word_embeddings else weights.take("lm_head.weight", vocabulary, width)
        self._head = linear(head)
        self._rotation = rotation(config, max_model_len).to(self.device, self.dtype)
        self.adapters = Adapters(config, self._embedding)

    def hidden(
        self,
        token_ids: Tensor,
        step: AnyStep,
        caches: Sequence[LayerCache],
        attention: Attention[AnyStep],
        adapted: Changing | None = None,
    ) -> Tensor:
        """Compute the last layer's hidden states, and store the rows' KV in the caches."""
        rows, delta = self._embedding[token_ids], None
        turn = self._rotation[step.positions]
        for layer, cache in zip(self._layers, caches, strict=True):
            rows, delta = layer.run(rows, delta, turn, step, cache, attention, adapted)
        return rows if delta is None else rows + delta

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, vocabulary] in float32."""
        _, rows = self.pointwise.add_norm(hidden, None, self._norm, self.config.rms_norm_eps)
        logits = self._head(rows)
        return logits.float() if out is None else out.copy_(logits)


class Layer:
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(self, config: ModelConfig, weights: Source, index: int, pointwise: Pointwise) -> None:
        name = f"model.layers.{index}."
        self._index = index
        self._pointwise = pointwise
        self._eps = config.rms_norm_eps
        width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self._input_norm = weights.take(f"{name}input_layernorm.weight", width)
        self._post_norm = weights.take(f"{name}post_attention_layernorm.weight", width)
        projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self._qkv = _joined(weights, f"{name}self_attn.", projections, width, biased=config.qkv_bias)
        self._output = _joined(weights, f"{name}self_attn.", {"o_proj": width}, queries, biased=config.output_bias)
        self._gate_up = _joined(
            weights, f"{name}mlp.", {"gate_proj": inner, "up_proj": inner}, width, biased=config.mlp_bias
        )
        self._down = _joined(weights, f"{name}mlp.", {"down_proj": width}, inner, biased=config.mlp_bias)
        norms = None
        if config.qk_norm:
            query_norm, key_norm = (weights.take(f"{name}self_attn.{part}_norm.weight", head_dim) for part in "qk")
            norms = query_norm, key_norm
        self._heads = Heads(config.num_heads, config.num_kv_heads, head_dim, norms, self._eps)

    def run(
        self,
        rows: Tensor,
        delta: Tensor | None,
        turn: Tensor,
        step: AnyStep,
        cache: LayerCache,
        attention: Attention[AnyStep],
        adapted: Changing | None,
    ) -> tuple[Tensor, Tensor]:
        """The rows, and what is still to be added to them: whoever comes next does both in one pass."""
        rows, inputs = self._pointwise.add_norm(rows, delta, self._input_norm, self._eps)
        qkv = self._product(self._qkv, inputs, Place.QKV, adapted)
        queries = self._pointwise.turn_and_store(qkv, self._heads, turn, cache, step)
        attended = attention.attend(queries, cache, step).flatten(1)
        delta = self._product(self._output, attended, Place.OUTPUT, adapted)
        rows, inputs = self._pointwise.add_norm(rows, delta, self._post_norm, self._eps)
        if adapted is None:
            return rows, tiled(lambda tile: self._mlp(tile, None), inputs)
        return rows, self._mlp(inputs, adapted)  # the projection knows its rows by their numbers

    def _mlp(self, inputs: Tensor, adapted: Changing | None) -> Tensor:
        gate_up = self._product(self._gate_up, inputs, Place.GATE_UP, adapted)
        inner = self._pointwise.swiglu(gate_up)
        return self._product(self._down, inner, Place.DOWN, adapted)

    def _product(self, linear: Linear, inputs: Tensor, place: Place, adapted: Changing | None) -> Tensor:
        product = linear(inputs)
        if adapted is not None:
            adapted.add(self._index, place, inputs, product)
        return product


def _joined(weights: Source, name: str, outputs: dict[str, int], inputs: int, *, biased: bool) -> Linear:
    """Several projections of the same rows as one product."""
    matrices = [weights.take(f"{name}{part}.weight", size, inputs) for part, size in outputs.items()]
    biases = [weights.take(f"{name}{part}.bias", size) for part, size in outputs.items()] if biased else []
    return linear(torch.cat(matrices), torch.cat(biases) if biases else None)


def rotation(config: ModelConfig, positions: int) -> Tensor:
    """The cosines and sines of all positions, [positions, 2, 1, head_dim / 2]; the 1 stands for the heads.

    Each pair of a head's dimensions is turned by the token's position times the pair's frequency.
    """
    if positions * config.head_dim * ROTATION_BYTES > MAX_ROTATION_BYTES:
        most = f"{MAX_ROTATION_BYTES / 1e9:g} GB"
        raise ValueError(f"the rotations of {positions} positions take more than {most}; give a lower --max-model-len")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        # Llama 3's: slow turns are slowed down by the factor, fast ones stay, and between them it goes smoothly.
        scaling = config.rope_scaling
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_position_embeddings / wavelengths  # within the length it was trained for
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        frequencies = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1).unsqueeze(2)
