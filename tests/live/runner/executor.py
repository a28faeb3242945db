"""The model runner of ../shared/real-vllm, for more kinds of caches. Runs inside vLLM, in an environment of its own."""

from dataclasses import replace
from os import environ

import torch
from fakevllm import FakeExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec


class Executor(FakeExecutor):  # type: ignore[misc]
    """FAKE_KV names the kinds of its layers. All pages have the same bytes."""

    def do_get_kv_cache_spec(self) -> dict[str, object]:
        kinds = environ.get("FAKE_KV", "full")
        block, window = self.vllm_config.cache_config.block_size, int(environ.get("FAKE_WINDOW", "128"))
        common = {"block_size": block, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
        full, slide = FullAttentionSpec(**common), SlidingWindowSpec(sliding_window=window, **common)
        state = MambaSpec(
            block_size=block,
            shapes=((full.page_size_bytes // 4,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
        layers: dict[str, tuple[object, ...]] = {
            "full": (full,),
            "sliding": (slide,),
            "hybrid": (full, slide),
            "sizes": (full, replace(slide, block_size=2 * block, head_size=8)),
            "mamba": (full, state),
            "mamba sizes": (full, replace(state, block_size=4 * block)),
            "all": (full, slide, state),
        }
        if "mamba" in kinds or kinds == "all":
            self.vllm_config.cache_config.mamba_cache_mode = "align"
        return {f"l{number}": spec for number, spec in enumerate(layers[kinds])}
