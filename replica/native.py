"""The runner that computes: a transformer, its KV memory, and what samples from it."""

import logging
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.backends import choose
from kernels.linear import can_pack
from kernels.paged import Attention, LayerCache, Step
from kernels.spans import Span
from replica.config import EngineConfig
from replica.model.config import read_config
from replica.model.transformer import Transformer
from replica.model.weights import Weights
from replica.request import Scheduled
from replica.runner import Sampled
from replica.sampling import sample, token_logprobs

log = logging.getLogger(__name__)

LOGITS_AT_ONCE = 1 << 23


def build(config: EngineConfig) -> "NativeRunner":
    """Load the model and take the memory for its KV; ValueError, OSError or MemoryError where that cannot be."""
    folder, dtype = Path(config.model_path), getattr(torch, config.dtype)
    choice = choose(config.attention)
    for name, reason in choice.passed.items():
        log.warning("attention %s cannot be used: %s", name, reason)
    if not can_pack(dtype):
        log.warning("this torch does not pack %s weights: slower, and bits depend on the rest of a batch", config.dtype)
    torch.set_num_threads(os.cpu_count() or 1)  # packing is all there is to do now
    with Weights(folder, dtype) as weights:
        model = Transformer(read_config(folder), weights, config.max_model_len)
        weights.finish()
    torch.set_num_threads(config.threads)
    runner = NativeRunner(model, choice.attention, config.num_blocks, config.block_size)
    log.info(
        "%s: %s, %.1f M parameters, %s, attention %s, %d torch threads, %.2f GB of KV",
        folder.name,
        model.config.architecture,
        model.config.parameters / 1e6,
        config.dtype,
        choice.attention.name,
        config.threads,
        config.num_blocks * config.block_size * model.config.kv_bytes_per_token(config.dtype) / 1e9,
    )
    return runner


class NativeRunner:
    """`num_blocks` blocks of KV for each layer, zero at first."""

    def __init__(self, model: Transformer, attention: Attention, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.attention = attention
        self.block_size = block_size
        self.caches = _caches(model, num_blocks, block_size)
        self.vocab_size = model.config.vocab_size
        self.attention_name = attention.name

    @torch.inference_mode()
    def run(self, batch: Sequence[Scheduled]) -> list[Sampled | None]:
        if not batch:
            return []
        copies = [scheduled.copy for scheduled in batch if scheduled.copy is not None]
        if copies:
            self.attention.copy(self.caches, copies)
        order = sorted(range(len(batch)), key=lambda index: batch[index].tokens > 1)  # those that decode first
        ordered = [batch[index] for index in order]
        hidden = self._hidden(ordered)
        last_rows = [end - 1 for end in accumulate(scheduled.tokens for scheduled in ordered)]
        self._keep_prompt_logprobs(ordered, hidden, last_rows)
        results: list[Sampled | None] = [None] * len(batch)
        drawing = [place for place, scheduled in enumerate(ordered) if scheduled.samples]
        if drawing:
            logits = self.model.logits(hidden[[last_rows[place] for place in drawing]])
            drawn = sample(logits, [ordered[place].request for place in drawing])
            for place, sampled in zip(drawing, drawn, strict=True):
                results[order[place]] = sampled
        return results

    def _hidden(self, ordered: Sequence[Scheduled]) -> Tensor:
        spans = [Span(scheduled.request.blocks, scheduled.start, scheduled.tokens) for scheduled in ordered]
        decoding = sum(span.tokens == 1 for span in spans)
        step = Step(spans[:decoding], spans[decoding:], self.block_size)
        return self.model.hidden(_token_ids(ordered), step, self.caches, self.attention)

    def _keep_prompt_logprobs(self, ordered: Sequence[Scheduled], hidden: Tensor, last_rows: Sequence[int]) -> None:
        """Each row of a prompt says how likely its next token was; the last one's next token is no prompt's."""
        for scheduled, last_row in zip(ordered, last_rows, strict=True):
            request = scheduled.request
            wanted = request.sampling.prompt_logprobs
            if wanted is None or request.generated:
                continue
            start, rows = scheduled.start, min(scheduled.tokens, request.prompt_tokens - 1 - scheduled.start)
            first_row = last_row + 1 - scheduled.tokens
            for logits, begin in self._logits_in_chunks(hidden[first_row : first_row + rows]):
                first = start + begin + 1
                followers = request.chain.tokens[first : first + len(logits)]
                request.prompt_logprobs += token_logprobs(logits, list(followers), wanted)

    def _logits_in_chunks(self, hidden: Tensor) -> Iterator[tuple[Tensor, int]]:
        """All logits of a long prompt would be gigabytes."""
        size = max(1, LOGITS_AT_ONCE // self.vocab_size)
        for begin in range(0, len(hidden), size):
            yield self.model.logits(hidden[begin : begin + size]), begin


def _caches(model: Transformer, num_blocks: int, block_size: int) -> list[LayerCache]:
    size = num_blocks * block_size * model.config.kv_bytes_per_token(str(model.dtype).removeprefix("torch."))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:  # it would be given all the same, and be missing later
        raise MemoryError(
            f"{num_blocks} blocks of {block_size} tokens are {size / 1e9:,.1f} GB of KV, and this machine has "
            f"{memory / 1e9:,.1f} GB; lower --kv-cache-gb or --num-blocks"
        )
    return model.new_caches(num_blocks, block_size)


def _token_ids(ordered: Sequence[Scheduled]) -> Tensor:
    parts = [
        np.frombuffer(scheduled.request.chain.tokens, np.uint32, scheduled.tokens, scheduled.start * 4)
        for scheduled in ordered
    ]
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
