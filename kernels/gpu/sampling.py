"""From logits to tokens in Triton, in two launches.

The first surveys the rows, many programs for each: the peak of each chunk, what its weights sum up to, and the highest
logit of each group of neighbours. In the second a row has one program, which reads little: to draw from all tokens, the
sums and one chunk.

What `top_k`, `top_p` and `min_p` leave is bounded first. The groups' highest logits are logits of tokens: if k of them
reach a logit, or if those that reach it weigh enough, then what is looked for does not lie below. The few tokens above
such a floor are noted in their order, and what is exact is done on them.

A `row` is a tuple: where the logits lie, how many they are, the peak, log2(e) over the temperature, and `min_p`.

Thresholds are found by bisection over keys, integers in the order of the floats: at most 32 steps, and then exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.jit import jit, power_of_two
from kernels.sampling import GREEDY_BELOW

CHUNK = 4096  # logits
GROUP = 32  # logits
LANES = 4096
NOTED = 32768  # a row's candidates; the whole row is searched if more are left
SLACK = tl.constexpr(0.01)  # the slack of a weight's logarithm, for rounding
FAR = tl.constexpr(-1e30)  # a logit this far below the peak has no weight at any temperature
LOG2_E = tl.constexpr(1.4426950408889634)
GREEDY = tl.constexpr(GREEDY_BELOW)
HIGHEST = tl.constexpr(torch.finfo(torch.float32).max)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
ALL = tl.constexpr(-(2**31))  # the key that no float is below
NOTHING = tl.constexpr(ALL.value + 2**23)  # one above that of minus infinity, which has no weight


def draw(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, wheres: Tensor, out: Tensor
) -> None:
    """The same as `kernels.sampling.draw`, with float32 weights and float64 sums."""
    rows, vocab = logits.shape
    if not rows:
        return
    chunks = triton.cdiv(vocab, CHUNK)
    groups = chunks * (CHUNK // GROUP)
    peaks, highest = logits.new_empty(rows, chunks), logits.new_empty(rows, groups)
    sums = logits.new_empty(rows, chunks, dtype=torch.float64)
    places, broken = (out.new_empty(rows, chunks, dtype=torch.int32) for _ in range(2))  # each aligned
    survey_chunk[rows, chunks](
        *(logits, temperatures, peaks, sums, places, broken, highest, logits.stride(0), vocab, CHUNK, GROUP),
        num_warps=8,
    )
    noted, ids = logits.new_empty(rows, NOTED), out.new_empty(rows, NOTED, dtype=torch.int32)
    numbers = out.new_empty(rows, groups, dtype=torch.int32)
    draw_row[(rows,)](
        *(logits, temperatures, top_ks, top_ps, min_ps, wheres, out, peaks, sums, places, broken, highest),
        *(numbers, noted, ids, logits.stride(0), vocab, chunks, power_of_two(chunks), CHUNK, GROUP, LANES, NOTED),
        num_warps=16,
    )


@jit
def survey_chunk(
    logits: tl.tensor,
    temperatures: tl.tensor,
    peaks: tl.tensor,  # [rows, chunks]: the highest logit that is a number
    sums: tl.tensor,  # [rows, chunks]: of weights, whose highest is 1
    places: tl.tensor,  # [rows, chunks]: of the first that is highest
    broken: tl.tensor,  # [rows, chunks]: how many are not finite, but for those ruled out
    highest: tl.tensor,  # [rows, chunks, chunk / group]
    row_stride: tl.tensor,
    vocab: tl.tensor,
    chunk: tl.constexpr,
    group: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    at = row * tl.num_programs(1) + number
    groups: tl.constexpr = chunk // group
    place = number * chunk + tl.arange(0, groups)[:, None] * group + tl.arange(0, group)[None, :]
    inside = place < vocab
    logit = tl.load(logits + row.to(tl.int64) * row_stride + place, mask=inside, other=float("-inf"))
    # A number in place of NaN, as with torch's nan_to_num.
    sane = tl.where(logit != logit, float("-inf"), tl.minimum(tl.maximum(logit, LOWEST), HIGHEST))
    sane = tl.where(inside, sane, float("-inf"))
    of_groups = tl.max(sane, axis=1)
    peak = tl.max(of_groups, axis=0)
    first = tl.min(tl.min(tl.where(inside & (sane == peak), place, vocab), axis=1), axis=0)
    unfit = ((logit != logit) | (logit == float("inf"))).to(tl.int32)
    of_groups = tl.where(of_groups > LOWEST, of_groups, float("-inf"))
    tl.store(highest + at * groups + tl.arange(0, groups), of_groups)
    tl.store(peaks + at, peak)
    tl.store(places + at, first)
    count = tl.sum(tl.sum(unfit, axis=1), axis=0)
    tl.store(broken + at, count)
    temperature = tl.load(temperatures + row)
    if (temperature >= GREEDY) & (count == 0):
        weights = tl.exp2((logit - peak) * (LOG2_E / temperature)).to(tl.float64)
        tl.store(sums + at, tl.sum(tl.sum(tl.where(inside, weights, 0.0), axis=1), axis=0))


@jit
def draw_row(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    wheres: tl.tensor,
    out: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    places: tl.tensor,
    broken: tl.tensor,
    highest: tl.tensor,
    numbers: tl.tensor,  # [rows, groups]
    noted: tl.tensor,  # [rows, room]
    ids: tl.tensor,  # [rows, room]
    row_stride: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    padded_chunks: tl.constexpr,
    chunk: tl.constexpr,
    group: tl.constexpr,
    lanes: tl.constexpr,
    room: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    groups = chunks * (chunk // group)
    highest, numbers = highest + row * groups, numbers + row * groups
    noted, ids = noted + row * room, ids + row * room
    number = tl.arange(0, padded_chunks)
    at, there = row * chunks + number, number < chunks
    chunk_peaks = tl.load(peaks + at, mask=there, other=float("-inf"))
    peak = tl.max(chunk_peaks, axis=0)
    firsts = tl.load(places + at, mask=there, other=vocab)
    token = tl.min(tl.where(chunk_peaks == peak, firsts, vocab), axis=0)
    unfit = tl.sum(tl.load(broken + at, mask=there, other=0), axis=0) + (peak <= LOWEST).to(tl.int32)
    temperature, where = tl.load(temperatures + row), tl.load(wheres + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64), tl.load(min_ps + row)
    if (temperature >= GREEDY) & (unfit == 0):
        steepness = LOG2_E / temperature
        if (top_k <= 0) | (top_k >= vocab):
            top_k = 0
        scales = tl.exp2(tl.maximum(chunk_peaks - peak, FAR) * steepness).to(tl.float64)
        weighed = tl.where(there, tl.load(sums + at, mask=there, other=0.0) * scales, 0.0)
        total = tl.sum(weighed, axis=0)
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0):
            known = highest, groups, peak, steepness, min_p
            if top_k > 0:
                floor = cut(known, NOTHING, top_k.to(tl.float64), False, lanes)
            else:
                # Even all tokens lighter than this weigh less than `top_p` leaves out. Likely ones may be neighbours,
                # of which groups show one.
                lightest = tl.where(min_p > 0, min_p, ((1.0 - top_p) * total / vocab).to(tl.float32))
                floor = key_of(peak + (tl.log2(lightest) - SLACK) / steepness).to(tl.int64)
                if (top_p < 1.0) & (min_p <= 0):
                    floor = tl.maximum(floor, cut(known, NOTHING, top_p * total, True, lanes))
                floor = tl.maximum(floor, NOTHING)
            left = note((logits, vocab), floor, known, (numbers, noted, ids), group, lanes, room)
            kept = tl.where(left <= room, noted, logits), tl.where(left <= room, left, vocab), peak, steepness, min_p
            key = floor
            if top_k > 0:
                key = cut(kept, key, top_k.to(tl.float64), False, lanes)
            if top_p < 1.0:
                if (top_k > 0) | (min_p > 0):
                    total = amount(kept, key, True, lanes)
                key = cut(kept, key, top_p * total, True, lanes)
            token = pick(kept, key, where, lanes)
            if left <= room:
                token = tl.load(ids + token)
        else:
            goal, ends = where * total, tl.cumsum(weighed, axis=0)
            here = tl.min(tl.where((ends > goal) & (weighed > 0), number, padded_chunks), axis=0)
            here = tl.minimum(here, tl.max(tl.where(weighed > 0, number, 0), axis=0))
            own = tl.sum(tl.where(number == here, weighed, 0.0), axis=0)
            before = tl.sum(tl.where(number < here, weighed, 0.0), axis=0)
            its_peak, first = tl.max(tl.where(number == here, chunk_peaks, float("-inf")), axis=0), here * chunk
            of_chunk = logits + first, tl.minimum(vocab - first, chunk), its_peak, steepness, min_p
            token = first + pick(of_chunk, ALL, (goal - before) / own, lanes)
    tl.store(out + row, token.to(tl.int64))


@jit
def key_of(logit: tl.tensor) -> tl.tensor:
    """An integer key that sorts as its logit; both zeros have the same key."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def weights_of(
    row: tl.tensor, first: tl.tensor, key: tl.tensor, weighed: tl.constexpr, lanes: tl.constexpr
) -> tl.tensor:
    """Weights of the logits from `first` on: 0 below the key, else exp of the scaled distance to the peak, or 1."""
    values, count, peak, steepness, min_p = row
    place = first + tl.arange(0, lanes)
    logit = tl.load(values + place, mask=place < count, other=float("-inf"))
    counts = (place < count) & (key_of(logit) >= key)
    if not weighed:
        return counts.to(tl.float64)
    weight = tl.exp2((logit - peak) * steepness)
    return tl.where(counts & (weight >= min_p), weight, 0.0).to(tl.float64)


@jit
def amount(row: tl.tensor, key: tl.tensor, weighed: tl.constexpr, lanes: tl.constexpr) -> tl.tensor:
    sums = tl.zeros([lanes], tl.float64)
    for first in range(0, row[1], lanes):
        sums += weights_of(row, first, key, weighed, lanes)
    return tl.sum(sums, axis=0)


@jit
def cut(row: tl.tensor, low: tl.tensor, wanted: tl.tensor, weighed: tl.constexpr, lanes: tl.constexpr) -> tl.tensor:
    """The highest key from `low` to the peak's that at least the wanted amount reaches."""
    low = low + tl.zeros([], tl.int64)
    high = key_of(row[2]).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = amount(row, middle, weighed, lanes) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@jit
def note(
    whole: tl.tensor,
    floor: tl.tensor,
    known: tl.tensor,
    into: tl.tensor,
    group: tl.constexpr,
    lanes: tl.constexpr,
    room: tl.constexpr,
) -> tl.tensor:
    """Write the logits and ids that reach the floor, in order, as far as they fit; return the number of all."""
    logits, vocab = whole
    highest, groups = known[0], known[1]
    numbers, noted, ids = into
    lane = tl.arange(0, lanes)
    found = tl.zeros([], tl.int32)
    for first in range(0, groups, lanes):
        of_group = tl.load(highest + first + lane, mask=first + lane < groups, other=float("-inf"))
        reaches = ((first + lane < groups) & (key_of(of_group) >= floor)).to(tl.int32)
        tl.store(numbers + found + tl.cumsum(reaches, axis=0) - 1, first + lane, mask=reaches > 0)
        found += tl.sum(reaches, axis=0)
    tl.debug_barrier()  # another lane reads the stored value
    count = tl.zeros([], tl.int32)
    for first in range(0, found * group, lanes):
        number = tl.load(numbers + (first + lane) // group, mask=first + lane < found * group, other=0)
        token = number * group + lane % group
        inside = (first + lane < found * group) & (token < vocab)
        logit = tl.load(logits + token, mask=inside, other=float("-inf"))
        reaches = (inside & (key_of(logit) >= floor)).to(tl.int32)
        place = count + tl.cumsum(reaches, axis=0) - 1
        fits = (reaches > 0) & (place < room)
        tl.store(noted + place, logit, mask=fits)
        tl.store(ids + place, token, mask=fits)
        count += tl.sum(reaches, axis=0)
    tl.debug_barrier()
    return count


@jit
def pick(row: tl.tensor, key: tl.tensor, where: tl.tensor, lanes: tl.constexpr) -> tl.tensor:
    """The position whose share of the cumulated weights holds this point of [0, 1); its weight is never 0."""
    lane = tl.arange(0, lanes)
    goal = where * amount(row, key, True, lanes)
    count = row[1]
    before, found, last = tl.zeros([], tl.float64), count + 0, tl.zeros([], tl.int32)
    for first in range(0, count, lanes):
        weights = weights_of(row, first, key, True, lanes)
        here = tl.sum(weights, axis=0)
        if (found == count) & (before + here > goal):
            beyond = (before + tl.cumsum(weights, axis=0) > goal) & (weights > 0)
            found = tl.min(tl.where(beyond, first + lane, count), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, first + lane, 0), axis=0))
        before += here
    return tl.where(found < count, found, last)
