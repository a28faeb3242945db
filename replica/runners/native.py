"""The runner on a CPU: a transformer, its KV memory and its sampler."""

import os
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np
import torch

from kernels.contexts import ContextStep
from kernels.paged import Attention, LayerCache
from kernels.spans import Span
from replica.config import EngineConfig
from replica.model.config import DTYPE_BYTES, ModelConfig
from replica.model.weights import Weights
from replica.runners.request import Scheduled
from replica.runners.runner import ArrayMemory, BlockMemory, ImmediateRunner, SampledToken
from replica.runners.sampling import keep_prompt_logprobs, sample
from replica.transformer import Transformer


class NativeRunner(ImmediateRunner):
    """MemoryError for more KV than this machine has: it would be given all the same, and be missing later."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, attention: Attention[ContextStep]) -> None:
        torch.set_num_threads(config.threads)
        dtype = getattr(torch, config.dtype)
        with Weights(Path(config.model_path), dtype, digests=config.keeps_kv) as weights:
            self.model = Transformer(model_config, weights, config.max_model_len)
            weights.finish()
        self.weights_digest = weights.digest
        self.adapters = self.model.adapters
        self.model.adapters.load_named(config)
        self.attention = attention
        self.attention_name = attention.name
        self.num_blocks = config.num_blocks
        self.block_size = config.block_size
        self.vocab_size = model_config.vocab_size
        slots = self.block_size, model_config.num_kv_heads, model_config.head_dim
        shape = model_config.num_layers, 2, self.num_blocks, prod(slots) * DTYPE_BYTES[config.dtype]
        size, memory = prod(shape), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > memory:
            raise MemoryError(
                f"{self.num_blocks} blocks of {self.block_size} tokens are {size / 1e9:,.1f} GB of KV, and this "
                f"machine has {memory / 1e9:,.1f} GB; lower --kv-cache-gb or --num-blocks"
            )
        # The system gives numpy's zeros when they are first written; torch's own would take all of them at once.
        kv = np.zeros(shape, np.uint8)
        layers = torch.from_numpy(kv).view(self.model.dtype).view(*shape[:3], *slots)
        self.caches = [LayerCache(keys, values) for keys, values in layers]
        self.memory: BlockMemory | None = ArrayMemory(kv)

    @torch.inference_mode()
    def run(self, batch: Sequence[Scheduled]) -> list[SampledToken | None]:
        if not batch:
            return []
        copies = [scheduled.copy for scheduled in batch if scheduled.copy is not None]
        if copies:
            self.model.pointwise.copy(self.caches, copies)
        step = ContextStep([Span(one.request.blocks, one.start, one.tokens) for one in batch], self.block_size)
        token_ids = np.concatenate([scheduled.token_ids for scheduled in batch]).astype(np.int64)
        adapted = self.model.adapters.rows((one.request.chain.lora_name, one.tokens) for one in batch)
        hidden = self.model.hidden(torch.from_numpy(token_ids), step, self.caches, self.attention, adapted)
        last_rows = [end - 1 for end in accumulate(scheduled.tokens for scheduled in batch)]
        keep_prompt_logprobs(self.model, batch, hidden, last_rows)
        results: list[SampledToken | None] = [None] * len(batch)
        drawing = [place for place, scheduled in enumerate(batch) if scheduled.samples]
        if drawing:
            logits = self.model.logits(hidden[[last_rows[place] for place in drawing]])
            drawn = sample(logits, [batch[place].request for place in drawing])
            for place, sampled in zip(drawing, drawn, strict=True):
                results[place] = sampled
        return results
