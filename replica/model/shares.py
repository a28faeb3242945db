"""Each rank's share of a model, without torch.

Heads, the MLP's inner dimension and the vocabulary are divided among ranks. A rank holds at least one KV head, so with
fewer heads than ranks some ranks hold the same one.
"""

from typing import NamedTuple

import msgspec

from replica.model.config import ModelConfig

OPTION = "--tensor-parallel-size"


class Share(NamedTuple):
    """The place of one process among those that compute a model."""

    rank: int
    size: int

    def part(self, whole: int) -> slice:
        """Return this rank's part of so many rows; parts differ by one row at most."""
        return slice(whole * self.rank // self.size, whole * (self.rank + 1) // self.size)

    def kv_heads(self, config: ModelConfig) -> slice:
        """Return the KV heads that this rank's query heads attend to."""
        first = self.rank * config.num_kv_heads // self.size
        return slice(first, first + max(1, config.num_kv_heads // self.size))

    def own(self, config: ModelConfig) -> ModelConfig:
        """Return the shapes of this rank's part of the model."""
        return msgspec.structs.replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=_length(self.kv_heads(config)),
            intermediate_size=_length(self.part(config.intermediate_size)),
            vocab_size=_length(self.part(config.vocab_size)),
        )


WHOLE = Share(0, 1)


class Part(NamedTuple):
    """One rank's rows or columns of a matrix, and how many the whole has."""

    own: slice
    whole: int


class Parts(NamedTuple):
    """The modules whose rows are divided, and those whose columns are, where results are summed over the ranks."""

    rows: dict[str, Part]
    columns: dict[str, Part]


def parts_of(config: ModelConfig, share: Share) -> Parts:
    queries = Part(_scaled(share.part(config.num_heads), config.head_dim), config.num_heads * config.head_dim)
    keys = Part(_scaled(share.kv_heads(config), config.head_dim), config.num_kv_heads * config.head_dim)
    inner = Part(share.part(config.intermediate_size), config.intermediate_size)
    vocabulary = Part(share.part(config.vocab_size), config.vocab_size)
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": inner, "up_proj": inner}
    return Parts(rows | {"embed_tokens": vocabulary, "lm_head": vocabulary}, {"o_proj": queries, "down_proj": inner})


def refuse_what_does_not_divide(config: ModelConfig, size: int) -> None:
    """Raise ValueError, with what to do, for a model that so many ranks cannot share."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size:
        raise ValueError(f"{OPTION} {size} does not divide the model's {heads} attention heads; give a divisor of them")
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"{OPTION} {size} fits the model's {kv_heads} KV heads only if one number divides the other; give another"
        )
    if min(config.intermediate_size, config.vocab_size) < size:
        raise ValueError(
            f"{OPTION} {size} is more than the model's intermediate_size {config.intermediate_size} or vocabulary of "
            f"{config.vocab_size}; give less"
        )


def kv_copies(config: ModelConfig, size: int) -> int:
    """Return how many ranks hold the same KV head."""
    return max(1, size // config.num_kv_heads)


def _scaled(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
