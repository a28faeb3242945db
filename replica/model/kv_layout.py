"""The fingerprint by which replicas, and files on disk, know that they may use each other's blocks."""

from pathlib import Path

import msgspec
from xxhash import xxh3_128_hexdigest

from replica.model.config import ModelConfig
from replica.model.weights_digest import weights_digest

VERSION = 1  # raise it when the same weights and tokens give other bytes of a block


def kv_layout(config: ModelConfig, *, dtype: str, block_size: int, model: str, folder: Path, arrangement: str) -> str:
    """32 hexadecimal digits that are equal only if a block's key and bytes mean the same, on any machine.

    `model` is the name in block keys, `folder` has the weights, and `arrangement` names the order of a block's bytes.
    """
    parts = (VERSION, model, dtype, block_size, arrangement, config, weights_digest(folder))
    return xxh3_128_hexdigest(msgspec.json.encode(parts))
