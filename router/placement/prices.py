"""Prices of tokens that a replica need not compute: it brings their blocks from another memory, or from a neighbour.

A token from a source takes 1 / rate seconds there, and computing it takes 1 / prefill rate. The price is the one as a
share of the other. A source that is dearer than computing is not used.
"""

from collections.abc import Mapping
from types import MappingProxyType

GPU = "GPU"  # costs nothing
CPU = "CPU"
STORAGE = "STORAGE"
PULL = "PULL"

# Tokens per second until a replica says its own: KV of 320 KB a token, half of a PCIe 5 bus, 100 Gb/s, a fast disk.
TOKENS_PER_S = {CPU: 100_000.0, PULL: 40_000.0, STORAGE: 20_000.0}
# Media of engines, the cheapest first; any other is taken for a disk.
_SOURCES = {"GPU": GPU, "CPU": CPU, "CPU_PINNED": CPU, "STORAGE": STORAGE, "DISK": STORAGE, "EXTERNAL": STORAGE}
OWN_SOURCES = (CPU, STORAGE)  # below the GPU, in the order of their usual prices

PULL_S = 0.005  # a pull's fixed cost: a question and its answer, and work that the neighbour does meanwhile
LEAST_PULLED_TOKENS = 256  # nobody pulls for less

UNKNOWN_RATES: Mapping[str, float] = MappingProxyType({})


def source_of(medium: str) -> str:
    return _SOURCES.get(medium, STORAGE)


def price(source: str, tokens_per_s: Mapping[str, float], prefill_tokens_per_s: float) -> float:
    """A token's price as a share of computing it, at most 1. `tokens_per_s`: as the replica reports, by source."""
    share = prefill_tokens_per_s / (tokens_per_s.get(source) or TOKENS_PER_S[source])
    return share if share < 1.0 else 1.0


def loading_price(tokens_per_s: Mapping[str, float], prefill_tokens_per_s: float) -> float:
    """The price of a token being brought from a source that is not known: that of the slowest in use."""
    sources = TOKENS_PER_S.keys() & tokens_per_s.keys() or (CPU,)
    return max(price(source, tokens_per_s, prefill_tokens_per_s) for source in sources)
