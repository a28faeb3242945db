"""The number of KV blocks that fit into a device's memory: the field's formula, and nothing but arithmetic.

    blocks = (memory x utilization - weights - workspace)
             // (2 x block_size x kv_heads x head_dim x bytes x layers)        2: keys and values

Memory is in bytes; a GB is 10^9 of them.
"""

import math

GIGABYTE = 10**9
CPU_KV_CACHE_GB = 1.0  # on a CPU, where nothing is said of the cache's size

# Bytes of one number. The last two are no types that the engine computes in.
DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: str) -> int:
    return int(2 * kv_heads * head_dim * layers * DTYPE_BYTES[dtype])


def kv_memory(memory: float, utilization: float, weights: float, workspace: float) -> float:
    """Bytes left for KV; below 0: bytes missing for the weights alone."""
    return memory * utilization - weights - workspace


def blocks_in(kv_bytes: float, block_size: int, bytes_per_token: int) -> int:
    """Whole blocks only. Rounded to bytes first: 0.9 x 80 GB is a little less than 72 GB in binary fractions."""
    return max(0, round(kv_bytes)) // (block_size * bytes_per_token)


def requests_in(blocks: int, block_size: int, tokens: int) -> int:
    """Requests of this length that fit at once, none of them sharing a prefix."""
    return blocks // math.ceil(tokens / block_size)
