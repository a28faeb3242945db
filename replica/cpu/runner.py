"""The runner on a CPU: a transformer, its KV memory and its sampler."""

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.contexts import ContextStep
from kernels.paged import Attention, LayerCache
from kernels.spans import Copy, Span
from replica.config import EngineConfig
from replica.model.config import ModelConfig
from replica.model.ranks import ALONE, Ranks
from replica.model.weights import Weights
from replica.parallel.shares import WHOLE, Share
from replica.parallel.weights import SharedWeights
from replica.runners.block_memory import ArrayMemory, BlockMemory
from replica.runners.request import Scheduled
from replica.runners.runner import ImmediateRunner, SampledToken
from replica.runners.sampling import keep_prompt_logprobs, sample
from replica.transformer import Transformer


def load(config: EngineConfig, model_config: ModelConfig, share: Share = WHOLE, ranks: Ranks = ALONE) -> Transformer:
    """Load this process's share of the model, and have torch use its share of the threads."""
    torch.set_num_threads(max(1, config.threads // share.size))
    with Weights(Path(config.model_path), getattr(torch, config.dtype), shows_progress=not share.rank) as weights:
        source = weights if share == WHOLE else SharedWeights(weights, model_config, share)
        # No request is longer than the cache, whatever a config.json claims: each position has a row of its own.
        longest = min(config.max_model_len, config.num_blocks * config.block_size)
        model = Transformer(model_config, source, longest, ranks=ranks)
        weights.finish()
    model.adapters.load_named(config)
    return model


class NativeRunner(ImmediateRunner):
    """`num_blocks` blocks of KV for each layer, zero at first."""

    def __init__(
        self,
        model: Transformer,
        attention: Attention[ContextStep],
        num_blocks: int,
        block_size: int,
        kv: tuple[list[LayerCache], ArrayMemory] | None = None,
    ) -> None:
        self.model = model
        self.adapters = model.adapters
        self.attention = attention
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.memory: BlockMemory | None
        self.caches, self.memory = kv or _caches(model, num_blocks, block_size)
        self.vocab_size = model.config.vocab_size
        self.attention_name = attention.name

    @torch.inference_mode()
    def run(self, batch: Sequence[Scheduled]) -> list[SampledToken | None]:
        if not batch:
            return []
        order = sorted(range(len(batch)), key=lambda index: batch[index].tokens > 1)  # those that decode first
        ordered = [batch[index] for index in order]
        spans = [Span(scheduled.request.blocks, scheduled.start, scheduled.tokens) for scheduled in ordered]
        token_ids = np.concatenate([scheduled.token_ids for scheduled in ordered]).astype(np.int64)
        # In the batch's order: a block that one request copies from may be a later one's to write on.
        copies = [scheduled.copy for scheduled in batch if scheduled.copy is not None]
        adapters = [scheduled.request.chain.lora_name for scheduled in ordered]
        hidden = self.compute(token_ids, spans, copies, adapters)
        last_rows = [end - 1 for end in accumulate(scheduled.tokens for scheduled in ordered)]
        keep_prompt_logprobs(self.model, ordered, hidden, last_rows)
        results: list[SampledToken | None] = [None] * len(batch)
        drawing = [place for place, scheduled in enumerate(ordered) if scheduled.samples]
        if drawing:
            logits = self.model.logits(hidden[[last_rows[place] for place in drawing]])
            drawn = sample(logits, [ordered[place].request for place in drawing])
            for place, sampled in zip(drawing, drawn, strict=True):
                results[order[place]] = sampled
        return results

    def compute(
        self,
        token_ids: NDArray[np.int64],
        spans: Sequence[Span],
        copies: Sequence[Copy],
        adapters: Sequence[str | None],
    ) -> Tensor:
        """Do the copies, then return the hidden states of these tokens; sequences that decode come first."""
        if copies:
            self.model.pointwise.copy(self.caches, copies)
        decoding = sum(span.tokens == 1 for span in spans)
        step = ContextStep(spans[:decoding], spans[decoding:], self.block_size)
        adapted = self.model.adapters.rows(zip(adapters, (span.tokens for span in spans), strict=True))
        return self.model.hidden(torch.from_numpy(token_ids), step, self.caches, self.attention, adapted)


def _caches(model: Transformer, num_blocks: int, block_size: int) -> tuple[list[LayerCache], ArrayMemory]:
    """Take memory for the KV of all layers; return it by layer, and as the bytes of blocks."""
    config = model.config
    size = num_blocks * block_size * config.kv_bytes_per_token(str(model.dtype).removeprefix("torch."))
    refuse_too_large(num_blocks, block_size, size)
    # The system gives this memory when it is first written: torch's own zeros would take all of it at once. Zeros,
    # because what was never written is read too, and multiplied by zero.
    block_bytes = block_size * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    array = np.zeros((config.num_layers, 2, num_blocks, block_bytes), np.uint8)
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    tensor = torch.from_numpy(array).view(model.dtype)
    return [LayerCache(keys.view(shape), values.view(shape)) for keys, values in tensor], ArrayMemory(array)


def refuse_too_large(num_blocks: int, block_size: int, size: int) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:  # it would be given all the same, and be missing later
        raise MemoryError(
            f"{num_blocks} blocks of {block_size} tokens are {size / 1e9:,.1f} GB of KV, and this machine has "
            f"{memory / 1e9:,.1f} GB; lower --kv-cache-gb or --num-blocks"
        )
