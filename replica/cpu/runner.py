"""The runner on a CPU: a transformer, its KV memory and its sampler."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.contexts import ContextStep
from kernels.paged import Attention
from kernels.spans import Copy, Span
from replica.config import EngineConfig
from replica.model.config import ModelConfig
from replica.model.ranks import ALONE, Ranks
from replica.parallel.memory import KvForm
from replica.parallel.shares import WHOLE, Share
from replica.parallel.weights import load_share
from replica.runners.block_memory import ArrayMemory, BlockMemory
from replica.runners.request import Scheduled
from replica.runners.runner import ImmediateRunner, SampledToken
from replica.runners.sampling import keep_prompt_logprobs, sample
from replica.transformer import Transformer


def load(config: EngineConfig, model_config: ModelConfig, share: Share = WHOLE, ranks: Ranks = ALONE) -> Transformer:
    """Load this process's share of the model, and have torch use its share of the threads."""
    torch.set_num_threads(max(1, config.threads // share.size))
    return load_share(config, model_config, share, ranks)


class NativeRunner(ImmediateRunner):
    """`kv` has the KV of all layers in this form, zero at first: what was never written is read, too."""

    def __init__(
        self, model: Transformer, attention: Attention[ContextStep], form: KvForm, kv: NDArray[np.uint8]
    ) -> None:
        self.model = model
        self.adapters = model.adapters
        self.attention = attention
        self.num_blocks = form.num_blocks
        self.block_size = form.block_size
        self.caches = form.own_caches(kv)
        self.memory: BlockMemory | None = ArrayMemory(kv)
        self.vocab_size = model.config.vocab_size
        self.attention_name = attention.name

    @torch.inference_mode()
    def run(self, batch: Sequence[Scheduled]) -> list[SampledToken | None]:
        if not batch:
            return []
        spans = [Span(scheduled.request.blocks, scheduled.start, scheduled.tokens) for scheduled in batch]
        token_ids = np.concatenate([scheduled.token_ids for scheduled in batch]).astype(np.int64)
        copies = [scheduled.copy for scheduled in batch if scheduled.copy is not None]
        adapters = [scheduled.request.chain.lora_name for scheduled in batch]
        hidden = self.compute(token_ids, spans, copies, adapters)
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

    def compute(
        self,
        token_ids: NDArray[np.int64],
        spans: Sequence[Span],
        copies: Sequence[Copy],
        adapters: Sequence[str | None],
    ) -> Tensor:
        """Do the copies in their order, then return the hidden states of these tokens."""
        if copies:
            self.model.pointwise.copy(self.caches, copies)
        step = ContextStep(spans, self.block_size)
        adapted = self.model.adapters.rows(zip(adapters, (span.tokens for span in spans), strict=True))
        return self.model.hidden(torch.from_numpy(token_ids), step, self.caches, self.attention, adapted)
