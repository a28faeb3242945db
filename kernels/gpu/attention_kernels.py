"""The kernels of paged attention: each program has some rows of one KV head, and walks their visible tokens.

Rows are packed. All query heads of a group read the same keys, so they are rows of one product:

    decode    row = head of the group                       tile of a sequence: its group, filled up to 16 rows
    prefill   row = token * group + head of the group       tiles of a sequence: so many such rows each

A sequence's tokens go by in tiles, and nothing behind its last token is read, of neither the memory nor the tables:
what was never written may be no number, which times zero is no number either.

The tokens before a program may be cut into splits. Then `combine_splits` adds up their results for a row: `averages`,
[rows, heads, splits, head_dim], and `marks`, [rows, heads, splits], log2 of what these have been divided by, and
-infinity where there was nothing.
"""

import triton.language as tl

from kernels.gpu.jit import jit, jit_for_any


@jit_for_any("splits", "table_stride")
def decode_split(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    decoders: tl.tensor,  # or None: all sequences there are programs for decode
    averages: tl.tensor,
    marks: tl.tensor,
    scale: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    splits: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    rows: tl.constexpr,
    whole: tl.constexpr,
) -> None:
    # KV heads are neighbours in memory, so they come first: those of one sequence run side by side.
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if decoders is not None and sequence >= tl.load(decoders):
        return
    length = tl.load(lengths + sequence)
    first, end = bounds_of_split(split, splits, length, tile)
    member, dims = tl.arange(0, rows), tl.arange(0, padded_dim)
    heads = kv_head * group + member
    if not whole and first >= end:
        places = (sequence.to(tl.int64) * tl.num_programs(0) * group + heads) * splits + split
        mark_nothing(marks + places, member < group, rows)
        return

    inside = (member < group)[:, None] & (dims < head_dim)[None, :]
    own = tl.load(
        queries + sequence.to(tl.int64) * row_stride + heads[:, None] * head_dim + dims[None, :], mask=inside, other=0.0
    )
    peaks, totals, sums = nothing(rows, padded_dim)
    table = tables + sequence.to(tl.int64) * table_stride
    keys += kv_head * head_stride
    values += kv_head * head_stride
    for token in range(first, end, tile):
        peaks, totals, sums = absorb(
            *(own, peaks, totals, sums, keys, values, table, token, end, member, scale, block_stride, token_stride),
            *(head_dim, padded_dim, block_size, tile, True, False),
        )

    totals = tl.where(totals > 0, totals, 1.0)  # of rows that have seen nothing: their peaks say so
    average = sums / totals[:, None]
    places = (sequence.to(tl.int64) * tl.num_programs(0) * group + heads) * splits + split
    tl.store(averages + places[:, None] * head_dim + dims[None, :], average.to(averages.dtype.element_ty), mask=inside)
    if not whole:
        tl.store(marks + places, peaks + tl.log2(totals), mask=member < group)


@jit_for_any("splits", "table_stride", "decoding", "prompts", "sequences")
def prefill_tile(
    queries: tl.tensor,  # from the row `decoding` on, and so are averages and marks
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    starts: tl.tensor,
    decoders: tl.tensor,  # or None
    averages: tl.tensor,
    marks: tl.tensor,
    scale: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    splits: tl.tensor,
    decoding: tl.tensor,  # sequences that are others' work
    prompts: tl.tensor,  # behind the `decoders`, at most
    sequences: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    rows: tl.constexpr,
    whole: tl.constexpr,
) -> None:
    kv_head, split = tl.program_id(1), tl.program_id(2)
    if decoders is not None and tl.load(decoders) >= sequences:
        return  # nobody has a prompt
    first_row = decoding
    if decoders is not None:
        decoding = tl.load(decoders)
        sequences = tl.minimum(decoding + prompts, sequences)
    sequence = sequence_of_tile(tl.program_id(0), starts, decoding, sequences, group, rows)
    begin, length = tl.load(starts + sequence), tl.load(lengths + sequence)
    tokens = tl.load(starts + sequence + 1) - begin
    own_tile = tl.program_id(0) - first_tile(begin, sequence, decoding, group, rows)
    number = tl.cdiv(tokens * group, rows) - 1 - own_tile  # the last tile sees most, and begins first
    if number < 0:
        return

    # row of the tile -> packed row, token * group + member -> row of the step, and head
    packed, dims = number * rows + tl.arange(0, rows), tl.arange(0, padded_dim)
    row, heads = (begin - first_row + packed // group).to(tl.int64), kv_head * group + packed % group
    there = packed < tokens * group
    # Rows see the tokens up to their own:   0 ...... lowest ...... highest ... length
    #                                        | by all  | by some      |
    positions = length - tokens + packed // group
    lowest = length - tokens + number * rows // group
    highest = length - tokens + (number * rows + rows - 1) // group
    first, end = bounds_of_split(split, splits, tl.minimum(highest + 1, length), tile)
    if not whole and first >= end:
        places = (row * tl.num_programs(1) * group + heads) * splits + split
        mark_nothing(marks + places, there, rows)
        return

    inside = there[:, None] & (dims < head_dim)[None, :]
    own = tl.load(
        queries + row[:, None] * row_stride + heads[:, None] * head_dim + dims[None, :], mask=inside, other=0.0
    )
    by_all = tl.maximum(tl.minimum(lowest + 1, end), first) // tile * tile
    peaks, totals, sums = nothing(rows, padded_dim)
    table = tables + sequence.to(tl.int64) * table_stride
    keys += kv_head * head_stride
    values += kv_head * head_stride
    for token in range(first, by_all, tile):
        peaks, totals, sums = absorb(
            *(own, peaks, totals, sums, keys, values, table, token, end, positions, scale, block_stride, token_stride),
            *(head_dim, padded_dim, block_size, tile, False, False),
        )
    for token in range(by_all, end, tile):
        peaks, totals, sums = absorb(
            *(own, peaks, totals, sums, keys, values, table, token, end, positions, scale, block_stride, token_stride),
            *(head_dim, padded_dim, block_size, tile, True, True),
        )

    totals = tl.where(totals > 0, totals, 1.0)  # of rows that have seen nothing: their peaks say so
    average = sums / totals[:, None]
    # There are as many KV heads as programs on this axis.
    places = (row * tl.num_programs(1) * group + heads) * splits + split
    tl.store(averages + places[:, None] * head_dim + dims[None, :], average.to(averages.dtype.element_ty), mask=inside)
    if not whole:
        tl.store(marks + places, peaks + tl.log2(totals), mask=there)


@jit_for_any("splits", "sequences")
def combine_splits(
    averages: tl.tensor,
    marks: tl.tensor,
    starts: tl.tensor,  # or None: there are only rows that belong to a sequence
    results: tl.tensor,  # [rows, heads, head_dim]
    splits: tl.tensor,
    sequences: tl.tensor,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_splits: tl.constexpr,
) -> None:
    if starts is not None and tl.program_id(0) >= tl.load(starts + sequences):
        return
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, dims = tl.arange(0, padded_splits), tl.arange(0, padded_dim)
    logs = tl.load(marks + row * splits + split, mask=split < splits, other=float("-inf"))
    peak = tl.max(logs, axis=0)
    weights = tl.exp2(logs - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, axis=0)
    inside = (logs > float("-inf"))[:, None] & (dims < head_dim)[None, :]
    parts = tl.load(averages + (row * splits + split)[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
    average = tl.sum(parts * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(results + row * head_dim + dims, average.to(results.dtype.element_ty), mask=dims < head_dim)


@jit
def first_tile(
    begin: tl.tensor, sequence: tl.tensor, decoding: tl.tensor, group: tl.constexpr, rows: tl.constexpr
) -> tl.tensor:
    """The first tile of a sequence: each earlier sequence may have one partial tile."""
    return (begin - decoding) * group // rows + sequence - decoding


@jit
def sequence_of_tile(
    number: tl.tensor,
    starts: tl.tensor,
    decoding: tl.tensor,
    sequences: tl.tensor,
    group: tl.constexpr,
    rows: tl.constexpr,
) -> tl.tensor:
    """The last sequence whose tiles begin at or before this one."""
    low, high = decoding, sequences
    while high - low > 1:
        middle = (low + high) // 2
        before = first_tile(tl.load(starts + middle), middle, decoding, group, rows) <= number
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@jit
def bounds_of_split(split: tl.tensor, splits: tl.tensor, tokens: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """The tokens of a split, in whole tiles, so that only the last split is cut."""
    share = tl.cdiv(tl.cdiv(tokens, splits), tile) * tile
    return split * share, tl.minimum(split * share + share, tokens)


@jit
def mark_nothing(marks: tl.tensor, there: tl.tensor, rows: tl.constexpr) -> None:
    tl.store(marks, tl.full([rows], float("-inf"), tl.float32), mask=there)


@jit
def nothing(rows: tl.constexpr, padded_dim: tl.constexpr) -> tl.tensor:
    """The running softmax before the first token: peak, sum of weights, and weighted values."""
    peaks = tl.full([rows], float("-inf"), tl.float32)
    return peaks, tl.zeros([rows], tl.float32), tl.zeros([rows, padded_dim], tl.float32)


@jit
def absorb(
    own: tl.tensor,  # [rows, padded_dim]: queries
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    positions: tl.tensor,
    scale: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    last: tl.constexpr,  # tokens of this tile may be behind the end
    causal: tl.constexpr,  # or behind some of the rows
) -> tl.tensor:
    """Add a tile of tokens to the rows' running softmax."""
    tokens, dims = first + tl.arange(0, tile), tl.arange(0, padded_dim)
    there = tokens < end if last else tokens >= 0
    blocks = load_masked(table + tokens // block_size, there, last)
    places = blocks.to(tl.int64) * block_stride + (tokens % block_size) * token_stride
    inside = there[:, None] & (dims < head_dim)[None, :]
    masked: tl.constexpr = last or head_dim != padded_dim
    seen_keys = load_masked(keys + places[:, None] + dims[None, :], inside, masked)
    scores = tl.dot(own, seen_keys.T, input_precision="ieee") * scale
    if causal:
        scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
    if last:
        scores = tl.where(there[None, :], scores, float("-inf"))

    higher = tl.maximum(peaks, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # of rows that have seen nothing yet
    weights, faded = tl.exp2(scores - base[:, None]), tl.exp2(peaks - base)
    seen_values = load_masked(values + places[:, None] + dims[None, :], inside, masked)
    sums = tl.dot(weights.to(seen_values.dtype), seen_values, sums * faded[:, None], input_precision="ieee")
    return higher, totals * faded + tl.sum(weights, axis=1), sums


@jit
def load_masked(pointers: tl.tensor, inside: tl.tensor, masked: tl.constexpr) -> tl.tensor:
    return tl.load(pointers, mask=inside, other=0) if masked else tl.load(pointers)
