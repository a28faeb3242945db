"""Takes the hottest prefixes of neighbours before the first request; what fails costs time, which is bounded."""

import logging
import random
import time
from collections.abc import Mapping, Sequence

from replica.cache.block_pool import BlockPool
from replica.cache.moves import Pull
from replica.neighbours.reader import Reader
from replica.neighbours.source import chain_of, refusal

log = logging.getLogger(__name__)

WARM_S = 10.0  # a replica is ready after this, whatever has come
SHARE = 0.25  # of the cache
MOST_NEIGHBOURS = 8


def warm(pool: BlockPool, reader: Reader, endpoints: Sequence[str], adapters: Mapping[str, str]) -> None:
    """Fill a part of a pool that nobody uses yet, with nothing of adapters that are not these, by name and digest."""
    began_s, left = time.monotonic(), int(pool.num_blocks * SHARE)
    some = random.sample(endpoints, min(len(endpoints), MOST_NEIGHBOURS))
    for number, endpoint in enumerate(some):
        # Each gets its part of the time and of the blocks, and of what those before it have left.
        now_s, others = time.monotonic(), len(some) - number
        until_s, most = now_s + (began_s + WARM_S - now_s) / others, left // others
        for read in reader.hottest(endpoint, most, until_s - now_s):
            is_of_another = read.lora_name is not None and adapters.get(read.lora_name) != read.lora_digest
            patience_s = until_s - time.monotonic()
            if refusal(read, reader.config) or is_of_another or patience_s <= 0:
                continue
            chain = chain_of(read, pool.block_size)
            match = pool.match(chain)
            start = len(match.blocks)
            taken = pool.take(match.blocks, read.stop - start) if 0 < read.stop - start <= most else None
            if taken is not None:
                came = reader.pull(Pull(endpoint, chain, start, taken[start:], patience_s))
                chain.named, chain.identity = start, match.identity
                pool.store(chain, taken, start + came)
                pool.release(taken)
                most, left = most - came, left - came
    log.info("took %d blocks from %s in %.1f s", reader.counts.blocks, ", ".join(some), time.monotonic() - began_s)
