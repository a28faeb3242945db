"""The layers of a model that computes nothing, by the kinds of caches that they need. Runs inside vLLM."""

from dataclasses import replace

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

WINDOW = 128  # tokens
CHUNK = 128  # tokens of chunked local attention


def layers(kinds: str, block_size: int) -> dict[str, KVCacheSpec]:
    """One layer for each kind. All pages have the same bytes, as vLLM wants it."""
    common = {"block_size": block_size, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    full, slide = FullAttentionSpec(**common), SlidingWindowSpec(sliding_window=WINDOW, **common)
    state = MambaSpec(
        block_size=block_size,
        shapes=((full.page_size_bytes // 4,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    named: dict[str, tuple[KVCacheSpec, ...]] = {
        "full": (full,),
        "sliding": (slide,),
        "hybrid": (full, slide),
        "sizes": (full, replace(slide, block_size=2 * block_size, head_size=8)),
        "mamba": (full, state),
        "mamba sizes": (full, replace(state, block_size=4 * block_size)),
        "all": (full, slide, state),
        "chunked": (full, ChunkedLocalAttentionSpec(attention_chunk_size=CHUNK, **common)),
    }
    return {f"l{number}": spec for number, spec in enumerate(named[kinds])}
