"""Engines of well-known shapes with random weights, made on the device; and requests to them."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from events.blocks import pack_tokens
from kernels.paged import KvShape
from replica.config import EngineConfig
from replica.device.accelerator import Accelerator
from replica.device.build import capture_all, layers_of, new_caches, sizes_of
from replica.device.runner import DeviceRunner
from replica.device.sizes import Limits
from replica.engine.engine import Engine
from replica.messages import Output, Sampling, Submit
from replica.model.config import ModelConfig, parse_config
from replica.model.sizing import blocks_in
from replica.runners.clock import WallClock
from replica.transformer import Transformer
from tests.gpu.place import Kernels, Place, chosen

QUICK = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 384,
}
BLOCK = 16
MAX_BLOCKS = 1 << 16


class RandomWeights:
    """Any tensor that a model asks for; norms are 1."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16, *, keeps: bool = False) -> None:
        self._device = device
        self._dtype = dtype
        self._keeps = keeps
        self._generator = torch.Generator(device).manual_seed(1)
        self.kept: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        made = torch.ones(shape, device=self._device, dtype=self._dtype)
        if len(shape) > 1:
            made.normal_(0, 0.02, generator=self._generator)
        if self._keeps:
            self.kept[name] = made
        return made


class Made(NamedTuple):
    """A model on the device."""

    model: Transformer
    kernels: Kernels
    accelerator: Accelerator

    def blocks_that_fit(self) -> int:
        """Number of blocks that fit in the free memory, with some room for a step."""
        if self.model.device.type != "cuda":
            return MAX_BLOCKS
        free = int(0.85 * torch.cuda.mem_get_info()[0])
        return blocks_in(free, BLOCK, self.model.config.kv_bytes_per_token("bfloat16"))

    def caches_of(self, blocks: int) -> list[Any]:
        return layers_of(new_caches(self.model, blocks + 1, BLOCK))


def fields_of(place: Place, shape: dict[str, Any]) -> dict[str, Any]:
    return shape | place.size({}, QUICK)


def made(place: Place, shape: dict[str, Any], longest: int) -> Made:
    config: ModelConfig = parse_config(fields_of(place, shape), "the shape")
    kernels = chosen(place, KvShape(torch.bfloat16, BLOCK, config.head_dim))
    with torch.inference_mode():
        model = Transformer(config, RandomWeights(place.device), longest, kernels.pointwise)
    return Made(model, kernels, place.accelerator())


def runner_of(of: Made, caches: list[Any], limits: Limits, *, graphs: bool = True) -> DeviceRunner:
    runner = DeviceRunner(of.model, of.kernels.attention, of.kernels.draw, caches, limits, of.accelerator)
    if graphs:
        capture_all(runner, sizes_of(limits, of.model.config))
    return runner


def engine_of(runner: DeviceRunner, limits: Limits, **changes: Any) -> Engine:
    return Engine(config_of(runner, limits, **changes), runner, WallClock())


def config_of(runner: DeviceRunner, limits: Limits, **changes: Any) -> EngineConfig:
    fields = {
        "model": "random",
        "dtype": "bfloat16",
        "block_size": BLOCK,
        "num_blocks": runner.num_blocks,
        "max_num_seqs": limits.requests,
        "max_num_batched_tokens": limits.rows,
        "max_model_len": limits.tokens,
        "events": None,
    }
    return EngineConfig(**{**fields, **changes})


# ---- requests


class Asked(NamedTuple):
    prompt: Sequence[int]
    sampling: Sampling


def tokens(chance: random.Random, count: int, vocabulary: int) -> list[int]:
    return [chance.randrange(vocabulary) for _ in range(count)]


def greedy(prompt: Sequence[int], max_tokens: int) -> Asked:
    return Asked(prompt, Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def submit(engine: Engine, asked: Sequence[Asked], first: int = 0) -> None:
    """Numbered from the first."""
    for number, one in enumerate(asked, first):
        prompt = pack_tokens(one.prompt)
        refused = engine.submit(Submit(number, prompt, one.sampling, priority=float(number)))
        if refused is not None:
            raise ValueError(f"request {number}: {refused.message}")


def finish(engine: Engine, hear: Callable[[Output], object]) -> None:
    while engine.busy:
        for output in engine.step():
            hear(output)
