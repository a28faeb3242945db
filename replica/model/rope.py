"""Rotary positions: each pair of a head's dimensions is turned by the token's position times the pair's frequency."""

import math

import torch
from torch import Tensor

from replica.model.config import Llama3Scaling, ModelConfig

FLOAT_BYTES = 4
MOST_BYTES = 8_000_000_000  # some ten million positions of the largest heads


def rotation(config: ModelConfig, positions: int) -> Tensor:
    """The cosines and sines of all positions, [positions, 2, 1, head_dim / 2]; the 1 stands for the heads."""
    if positions * config.head_dim * FLOAT_BYTES > MOST_BYTES:
        most = f"{MOST_BYTES / 1e9:g} GB"
        raise ValueError(f"the rotations of {positions} positions take more than {most}; give a lower --max-model-len")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _stretched(frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1).unsqueeze(2)


def _stretched(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3's: slow turns are slowed down by the factor, fast ones stay, and between them it goes smoothly."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths  # within the length it was trained for
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
