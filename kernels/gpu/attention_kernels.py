"""The kernels of paged attention: each program has some rows of one KV head, and walks their visible tokens.

Rows are packed. All query heads of a group read the same keys, so they are rows of one product:

    decode    row = head of the group                       tile of a sequence: its group, filled up to 16 rows
    prefill   row = token * group + head of the group       tiles of a sequence: so many such rows each

A sequence's tokens go by in tiles, and nothing behind its last token is read, of neither the memory nor the tables:
what was never written may be no number, which times zero is no number either.

What one program would read may be cut, so that several read it. Then their results are added up: `averages`, and
`marks`, log2 of what these have been divided by, and -infinity where there was nothing.

    decode    shares: a sequence has the more of them the longer it is, and all shares are numbered through
              averages [shares, heads, head_dim], marks [shares, heads]; a single share is the result itself
    prefill   splits, as many for each row
              averages [rows, heads, splits, head_dim], marks [rows, heads, splits]
"""

import triton.language as tl

from kernels.gpu.jit import jit, jit_for_any

AT_ONCE = tl.constexpr(64)  # shares that are added up at once
FIELDS = tl.constexpr(4)  # a row of a plan has this many


@jit_for_any("sequences", "extra")
def plan_shares(
    lengths: tl.tensor,
    decoders: tl.tensor,  # or None: all sequences decode
    of_sequences: tl.tensor,  # out, [sequences, FIELDS]: shares before it, and its own
    of_shares: tl.tensor,  # out, [sequences + extra, FIELDS]: sequence or -1, first token, end, shares of the sequence
    sequences: tl.tensor,
    extra: tl.tensor,
    tile: tl.constexpr,
    counted: tl.constexpr,  # sequences whose lengths are read at once
) -> None:
    """Divide the tokens of a step. `extra` shares of the largest size hold all, so cutting adds no more than these."""
    sequence, members = tl.program_id(0), tl.arange(0, counted)
    decoding = sequences
    if decoders is not None:
        decoding = tl.minimum(tl.load(decoders), sequences)
    tokens = tl.zeros([], tl.int32)
    for first in range(0, decoding, counted):
        tokens += tl.sum(tl.load(lengths + first + members, mask=first + members < decoding, other=0), axis=0)
    largest = tl.maximum(tl.cdiv(tl.cdiv(tokens, tl.maximum(extra, 1)), tile), 1) * tile
    if sequence == 0:
        used = shares_before(decoding, lengths, largest, counted)
        for first in range(used, sequences + extra, counted):
            tl.store(of_shares + (first + members) * FIELDS, -1, mask=first + members < sequences + extra)
    if sequence >= decoding:
        tl.store(of_sequences + sequence * FIELDS + 1, 1)
        return
    before = shares_before(sequence, lengths, largest, counted)
    length = tl.load(lengths + sequence)
    shares = tl.maximum(tl.cdiv(length, largest), 1)
    tl.store(of_sequences + sequence * FIELDS, before)
    tl.store(of_sequences + sequence * FIELDS + 1, shares)
    for first in range(0, shares, counted):
        begin, end = bounds_of_split(first + members, shares, length, tile)
        row, own = of_shares + (before + first + members) * FIELDS, first + members < shares
        tl.store(row, sequence + tl.zeros([counted], tl.int32), mask=own)
        tl.store(row + 1, begin, mask=own)
        tl.store(row + 2, end, mask=own)
        tl.store(row + 3, shares + tl.zeros([counted], tl.int32), mask=own)


@jit
def shares_before(sequence: tl.tensor, lengths: tl.tensor, largest: tl.tensor, counted: tl.constexpr) -> tl.tensor:
    members, before = tl.arange(0, counted), tl.zeros([], tl.int32)
    for first in range(0, sequence, counted):
        length = tl.load(lengths + first + members, mask=first + members < sequence, other=0)
        before += tl.sum(tl.where(first + members < sequence, tl.maximum(tl.cdiv(length, largest), 1), 0), axis=0)
    return before


@jit_for_any("table_stride")
def decode_share(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    of_shares: tl.tensor,
    results: tl.tensor,  # [rows, heads, head_dim]
    averages: tl.tensor,
    marks: tl.tensor,
    scale: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    # KV heads are neighbours in memory, so they come first: those of one sequence run side by side.
    kv_head, number = tl.program_id(0), tl.program_id(1)
    of_shares += number * FIELDS
    sequence, shares = tl.load(of_shares), tl.load(of_shares + 3)
    first, end = tl.load(of_shares + 1), tl.load(of_shares + 2)
    if sequence < 0:
        return
    member, dims = tl.arange(0, rows), tl.arange(0, padded_dim)
    heads = kv_head * group + member
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

    totals = tl.where(totals > 0, totals, 1.0)  # rows that have seen nothing have none: their peaks say so
    average = sums / totals[:, None]
    first_head = tl.where(shares == 1, sequence, number).to(tl.int64) * tl.num_programs(0) * group
    places = (first_head + heads)[:, None] * head_dim + dims[None, :]
    if shares == 1:
        tl.store(results + places, average.to(results.dtype.element_ty), mask=inside)
    else:
        tl.store(averages + places, average, mask=inside)
        tl.store(marks + first_head + heads, peaks + tl.log2(totals), mask=member < group)


@jit
def combine_shares(
    averages: tl.tensor,
    marks: tl.tensor,
    of_sequences: tl.tensor,
    results: tl.tensor,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
) -> None:
    """Add up the shares of a sequence, for one head."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    before, shares = tl.load(of_sequences + sequence * FIELDS), tl.load(of_sequences + sequence * FIELDS + 1)
    if shares == 1:
        return
    dims, some = tl.arange(0, padded_dim), tl.arange(0, AT_ONCE)
    peak, total = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32)
    sums = tl.zeros([padded_dim], tl.float32)
    for first in range(0, shares, AT_ONCE):
        places = (before + first + some).to(tl.int64) * tl.num_programs(1) + head
        logs = tl.load(marks + places, mask=first + some < shares, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(logs, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights, faded = tl.exp2(logs - base), tl.exp2(peak - base)
        inside = (logs > float("-inf"))[:, None] & (dims < head_dim)[None, :]
        parts = tl.load(averages + places[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
        sums = sums * faded + tl.sum(parts * weights[:, None], axis=0)
        total, peak = total * faded + tl.sum(weights, axis=0), higher
    average = sums / tl.where(total > 0, total, 1.0)
    place = sequence.to(tl.int64) * tl.num_programs(1) + head
    tl.store(results + place * head_dim + dims, average.to(results.dtype.element_ty), mask=dims < head_dim)


@jit_for_any("splits", "table_stride", "decoding", "prompts", "sequences")
def prefill_tile(
    queries: tl.tensor,  # the first row is `decoding`, as for averages and marks
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

    totals = tl.where(totals > 0, totals, 1.0)  # rows that have seen nothing have none: their peaks say so
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
    starts: tl.tensor,
    decoders: tl.tensor,  # or None: all rows are a prompt's
    results: tl.tensor,  # [rows, heads, head_dim]
    splits: tl.tensor,
    sequences: tl.tensor,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_splits: tl.constexpr,
) -> None:
    if decoders is not None and (tl.program_id(0) < tl.load(decoders)) | (
        tl.program_id(0) >= tl.load(starts + sequences)
    ):
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
    base = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen nothing yet have none
    weights, faded = tl.exp2(scores - base[:, None]), tl.exp2(peaks - base)
    seen_values = load_masked(values + places[:, None] + dims[None, :], inside, masked)
    sums = tl.dot(weights.to(seen_values.dtype), seen_values, sums * faded[:, None], input_precision="ieee")
    return higher, totals * faded + tl.sum(weights, axis=1), sums


@jit
def load_masked(pointers: tl.tensor, inside: tl.tensor, masked: tl.constexpr) -> tl.tensor:
    return tl.load(pointers, mask=inside, other=0) if masked else tl.load(pointers)
