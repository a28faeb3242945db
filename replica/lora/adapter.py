"""An adapter in the model's type and on its device, and what the adapters of a step's rows add to each projection.

A row's sum is the same to the last bit, in float32 on a CPU, whatever rows of whatever adapters stand beside it: the
products are `kernels.linear`'s (decision 0009).
"""

import logging
from collections.abc import Iterable
from enum import Enum
from math import gcd
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.adapters import EVEN, Change, change_of
from replica.config import EngineConfig
from replica.lora.files import AdapterFiles, Factors, read_adapter
from replica.model.config import ModelConfig

log = logging.getLogger(__name__)

MAX_EVEN = 16


class Place(Enum):
    """The products of a layer, each of which joins the projections of the same rows."""

    QKV = ("q_proj", "k_proj", "v_proj")
    OUTPUT = ("o_proj",)
    GATE_UP = ("gate_proj", "up_proj")
    DOWN = ("down_proj",)


class Adapter:
    def __init__(self, name: str, files: AdapterFiles, config: ModelConfig, like: Tensor) -> None:
        self.name = name
        self.digest = files.digest
        self.rank = files.rank
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # Each projection is a part of a product, and begins at a column of it.
        places = {part: place for place in Place for part in place.value}
        columns = {"k_proj": queries, "v_proj": queries + keys, "up_proj": config.intermediate_size}
        by_place: dict[tuple[int, Place], list[tuple[int, Factors]]] = {}
        for (layer, part), factors in files.factors.items():
            down, up = (factor.to(like.device, like.dtype) for factor in factors)
            if not bool(down.isfinite().all() & up.isfinite().all()):
                dtype = str(like.dtype).removeprefix("torch.")
                raise ValueError(f"the adapter {name!r} has values that {dtype} cannot hold")
            # Fill the rank up with zeros to a power of two: oneDNN keeps code for every shape that it meets.
            missing = max(EVEN, 1 << (len(down) - 1).bit_length()) - len(down)
            padded = Factors(functional.pad(down, (0, 0, 0, missing)), functional.pad(up, (0, missing)))
            by_place.setdefault((layer, places[part]), []).append((columns.get(part, 0), padded))
        self.changes: dict[tuple[int, Place], Change] = {}
        for where, parts in by_place.items():
            ups, rank = [], 0
            for start, (down, up) in parts:
                ups.append((up, slice(rank, rank + len(down)), slice(start, start + len(up))))
                rank += len(down)
            self.changes[where] = change_of(torch.cat([factors.down for _, factors in parts]), ups)
        self.room = max((change.ranks for change in self.changes.values()), default=0)


class Changing(Protocol):
    """The rows of a step, some of which have adapters."""

    def add(self, layer: int, place: Place, inputs: Tensor, product: Tensor) -> None:
        """Add to a product what the adapters change in it."""


class AdaptedRows:
    """The rows of a step whose requests have adapters."""

    def __init__(self, rows: Iterable[tuple[Adapter, Tensor]]) -> None:
        self._rows = list(rows)  # the numbers of its rows

    def add(self, layer: int, place: Place, inputs: Tensor, product: Tensor) -> None:
        """Add to a product what the adapters change in it."""
        for adapter, rows in self._rows:
            if (change := adapter.changes.get((layer, place))) is not None:
                change.add(inputs, product, rows)


class Adapters:
    """The adapters of one model by their names, as a runner computes with them."""

    def __init__(self, config: ModelConfig, like: Tensor) -> None:
        self.loaded: dict[str, Adapter] = {}
        self.layers = config.num_layers
        # A power of two that divides the columns where a product's projections begin and end.
        qkv = gcd(MAX_EVEN, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        width, inner = gcd(MAX_EVEN, config.hidden_size), gcd(MAX_EVEN, config.intermediate_size)
        self.evenness = {Place.QKV: qkv, Place.OUTPUT: width, Place.GATE_UP: inner, Place.DOWN: width}
        self._config = config
        self._like = like  # a weight of the model

    def read(self, name: str, folder: Path) -> Adapter:
        """Read an adapter, which is not among the loaded ones yet; ValueError or OSError if it does not fit."""
        return Adapter(name, read_adapter(folder, self._config), self._config, self._like)

    def load_named(self, config: EngineConfig) -> None:
        for module in config.lora_modules:
            self.loaded[module.name] = adapter = self.read(module.name, Path(module.folder))
            log.info("adapter %s, of rank %d, from %s", module.name, adapter.rank, module.folder)

    def rows(self, sequences: Iterable[tuple[str | None, int]]) -> AdaptedRows | None:
        """Group the rows of a step by the adapters of its sequences, so many rows each; None if none has one."""
        groups: dict[str, list[Tensor]] = {}
        first = 0
        for name, tokens in sequences:
            if name is not None:
                groups.setdefault(name, []).append(torch.arange(first, first + tokens))
            first += tokens
        if not groups:
            return None
        return AdaptedRows((self.loaded[name], torch.cat(rows)) for name, rows in groups.items())
