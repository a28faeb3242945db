"""The blocks that a reader wants, and whether what comes is that. Pure."""

from dataclasses import dataclass

from xxhash import xxh3_128_digest

from replica.cache.chain import Chain
from replica.neighbours.messages import Block, Lost, Offer, Read


@dataclass(frozen=True)
class Wanted:
    """A chain's blocks from `start` to `stop`, all of them full."""

    chain: Chain
    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop <= len(self.chain.keys), f"{self.start}..{self.stop} are no full blocks"

    @property
    def count(self) -> int:
        return self.stop - self.start

    def tokens(self, index: int) -> bytes:
        size = self.chain.block_size
        return self.chain.tokens[index * size : (index + 1) * size].tobytes()

    def request(self, model: str, kv_layout: str, transport: str, patience_s: float) -> Read:
        chain = self.chain
        return Read(
            model=model,
            prompt=chain.tokens[: self.stop * chain.block_size].tobytes(),
            start=self.start,
            stop=self.stop,
            kv_layout=kv_layout,
            lora_name=chain.lora_name,
            cache_salt=chain.cache_salt,
            extras={index: list(own) for index, own in chain.extras.items() if index < self.stop},
            transport=transport,
            patience_s=patience_s,
            lora_digest=chain.lora_digest,
        )


class Arrivals:
    """Checks one block after the other; Lost says what is wrong with one, and then none may follow."""

    def __init__(self, wanted: Wanted, block_bytes: int) -> None:
        self._wanted = wanted
        self._block_bytes = block_bytes
        self.offered = 0
        self.count = 0  # leading blocks that came and are right

    def offer(self, offer: Offer) -> None:
        if offer.blocks > self._wanted.count:
            raise Lost("protocol", f"{offer.blocks} blocks are offered and {self._wanted.count} were asked for")
        self.offered = offer.blocks

    @property
    def is_complete(self) -> bool:
        return self.count == self.offered

    def check_header(self, header: Block) -> None:
        """Check what can be known before the payload is read."""
        expected = self._wanted.start + self.count
        if header.index != expected:
            raise Lost("order", f"block {header.index} came and {expected} was due")
        if header.size != self._block_bytes:
            raise Lost("size", f"block {header.index} has {header.size} bytes; this layout has {self._block_bytes}")
        if header.tokens != self._wanted.tokens(expected):
            raise Lost("tokens", f"block {header.index} has other tokens")
        if header.exact != self._wanted.chain.exact.get(expected):
            raise Lost("tokens", f"block {header.index} has other extra keys")

    def check_payload(self, header: Block, payload: memoryview) -> None:
        """Count the block if its payload is the one that was sent."""
        if xxh3_128_digest(payload) != header.checksum:
            raise Lost("checksum", f"the payload of block {header.index} is damaged")
        self.count += 1
