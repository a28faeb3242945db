"""A rank computes with these: its share of the model on its device, and kernels that work there."""

import logging
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels.backends import ChosenAttention, choose
from kernels.paged import Attention, KvShape, LayerCache
from kernels.pointwise import Pointwise
from replica.config import EngineConfig
from replica.device.accelerator import Accelerator, Wait
from replica.device.memory import DeviceMemory
from replica.device.orders import Limits
from replica.device.steps import Draw, Steps
from replica.model.config import ModelConfig, read_config
from replica.model.ranks import Ranks
from replica.model.shares import WHOLE, Share, parts_of
from replica.model.weights import Weights
from replica.transformer import Transformer

log = logging.getLogger(__name__)

AnySteps = TypeVar("AnySteps", bound=Steps)


class Parts(NamedTuple):
    model: Transformer
    attention: Attention[Any]
    draw: Draw | None

    def with_kv(
        self, blocks: int, config: EngineConfig, accelerator: Accelerator, steps: type[AnySteps]
    ) -> tuple[AnySteps, DeviceMemory]:
        """Take memory for so many blocks, and one more for padding; return the steps that compute in it."""
        kv = new_caches(self.model, blocks + 1, config.block_size)
        made = steps(self.model, self.attention, self.draw, layers_of(kv), limits_of(config), accelerator)
        return made, DeviceMemory(kv, accelerator)


def load(config: EngineConfig, accelerator: Accelerator, ranks: Ranks) -> Parts:
    """Choose the kernels, and load this rank's share of the model and of the adapters that are named at the start."""
    folder, dtype, share = Path(config.model_path), getattr(torch, config.dtype), ranks.share
    model_config = read_config(folder)
    own = share.own(model_config)
    shape = KvShape(dtype, config.block_size, own.head_dim, own.num_heads // own.num_kv_heads)
    choice = choose(config.attention, "cuda", shape)
    if not share.rank:
        for name, reason in choice.passed.items():
            log.warning("attention %s cannot be used: %s", name, reason)
    pointwise, draw = kernels_for(choice, shape)
    with Weights(folder, dtype, Uploads(accelerator).send, shows_progress=not share.rank) as weights:
        source = weights if share == WHOLE else SharedWeights(weights, model_config, share)
        model = Transformer(model_config, source, config.max_model_len, pointwise, ranks)
        weights.finish()
    model.adapters.load_named(config)
    return Parts(model, choice.attention, draw)


def limits_of(config: EngineConfig) -> Limits:
    adapters = config.max_loras if config.lora_modules or config.loads_adapters else 0
    return Limits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len, adapters)


def kernels_for(choice: ChosenAttention, shape: KvShape) -> tuple[Pointwise, Draw]:
    """Ours, if Triton works here, whatever attention does; it was tried where attention is ours, too."""
    if choice.attention.name not in ("triton", "torch"):
        try:
            choice = choose("triton", "cuda", shape)
        except ValueError as error:
            log.warning("norms, rotations and draws are torch's, which is slower: %s", error)
            choice = choose("torch", "cuda", shape)
    if choice.attention.name == "torch":
        from kernels.sampling import draw

        return Pointwise(), draw
    from kernels.gpu.pointwise import TritonPointwise
    from kernels.gpu.sampling import draw as fused_draw

    return TritonPointwise(), fused_draw


def new_caches(model: Transformer, num_blocks: int, block_size: int) -> Tensor:
    """Allocate the caches of all layers, [layers, 2, num_blocks, ...].

    In memory a block's KV is in one piece, all layers together: so it is copied to and from the host at once.
    """
    config = model.own
    shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=model.dtype, device=model.device).movedim(0, 2)


def layers_of(caches: Tensor) -> list[LayerCache]:
    return [LayerCache(keys, values) for keys, values in caches]


PIECE_BYTES = 64 << 20


class Uploads:
    """Tensors go through two pieces of pinned memory in turns: while the device reads one, the other is filled."""

    def __init__(self, accelerator: Accelerator, piece_bytes: int = PIECE_BYTES) -> None:
        self._accelerator = accelerator
        self._hosts = [accelerator.host_bytes(piece_bytes) for _ in range(2)]
        self._waits: list[Wait] = [lambda: None, lambda: None]
        self._piece_bytes = piece_bytes

    def send(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device; work that is given to the device from now on finds it there."""
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._accelerator.device)
        source, target = (whole.view(-1).view(torch.uint8) for whole in (tensor.contiguous(), sent))
        for begin in range(0, len(source), self._piece_bytes):
            piece = source[begin : begin + self._piece_bytes]
            self._hosts.reverse()
            self._waits.reverse()
            self._waits[0]()
            host = self._hosts[0][: len(piece)]
            host.copy_(piece)
            target[begin : begin + len(piece)].copy_(host, non_blocking=True)
            self._waits[0] = self._accelerator.mark()
        return sent


class SharedWeights:
    """Reads only this rank's part of each tensor; `take` is given the shape of the part."""

    def __init__(self, weights: Weights, config: ModelConfig, share: Share) -> None:
        self._weights = weights
        self._share = share
        self._rows, self._columns = parts_of(config, share)

    def take(self, name: str, *shape: int) -> Tensor:
        *_, module, kind = name.split(".")
        if module in self._rows:
            part, whole = self._rows[module]
            return self._weights.take_part(name, (whole, *shape[1:]), (part,))
        if module in self._columns and kind == "bias":  # added once
            bias = self._weights.take(name, *shape)
            return torch.zeros_like(bias) if self._share.rank else bias
        if module in self._columns:
            part, whole = self._columns[module]
            return self._weights.take_part(name, (shape[0], whole), (slice(None), part))
        return self._weights.take(name, *shape)
