"""One rank's share of the model, read from the checkpoint."""

import os
from pathlib import Path

import torch

from replica.config import EngineConfig
from replica.model.transformer import Transformer
from replica.model.weights import Weights
from replica.parallel.group import GroupRanks
from replica.parallel.weights import SharedWeights


def load(config: EngineConfig, ranks: GroupRanks) -> Transformer:
    """ValueError, OSError: it cannot be loaded. Afterwards torch has this rank's share of the threads."""
    share = ranks.share
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // share.size))
    with Weights(Path(config.model_path), getattr(torch, config.dtype)) as weights:
        source = SharedWeights(weights, ranks.config, share)
        longest = min(config.max_model_len, config.num_blocks * config.block_size)
        model = Transformer(ranks.config, source, longest, ranks=ranks)
        weights.finish()
    torch.set_num_threads(max(1, config.threads // share.size))
    return model
