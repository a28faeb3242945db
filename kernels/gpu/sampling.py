"""From logits to tokens in Triton: one launch, one program per row.

A row is too long to be kept, so it is read as seldom as can be: for its peak; for the sum of its weights; for the draw.
What `top_k` and `top_p` leave is bounded first. A program's lanes each know the highest logit that they have met, and
those are tokens of the row: if k of them reach a logit, or if those that reach it weigh enough, then what is looked for
does not lie below. The few tokens above such a floor are noted in their order, and what is exact is done on them.

A `row` is a tuple: where the logits lie, how many they are, the peak, log2(e) over the temperature, and `min_p`.

Thresholds are found by bisection over keys, integers in the order of the floats: at most 32 steps, and then exact.
"""

import torch
import triton.language as tl
from torch import Tensor

from kernels.gpu.jit import jit
from kernels.sampling import GREEDY_BELOW

LANES = 4096
NOTED = 8192  # of a row; where more are left than this, the whole row is searched
LOG2_E = tl.constexpr(1.4426950408889634)
GREEDY = tl.constexpr(GREEDY_BELOW)
HIGHEST = tl.constexpr(torch.finfo(torch.float32).max)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
ALL = tl.constexpr(-(2**31))  # the key that no float is below


def draw(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, wheres: Tensor, out: Tensor
) -> None:
    """The same as `kernels.sampling.draw`, with float32 weights and float64 sums."""
    rows, vocab = logits.shape
    noted = logits.new_empty(rows, NOTED)
    ids = out.new_empty(rows, NOTED, dtype=torch.int32)
    if rows:
        draw_row[(rows,)](
            *(logits, temperatures, top_ks, top_ps, min_ps, wheres, out, noted, ids, logits.stride(0), vocab),
            *(LANES, NOTED),
            num_warps=16,
        )


@jit
def draw_row(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    wheres: tl.tensor,
    out: tl.tensor,
    noted: tl.tensor,
    ids: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    lanes: tl.constexpr,
    room: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    noted += row * room
    ids += row * room
    temperature, where = tl.load(temperatures + row), tl.load(wheres + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64), tl.load(min_ps + row)
    highest, token, broken = look(logits, vocab, lanes)
    if (temperature >= GREEDY) & (broken == 0):
        peak, steepness = tl.max(highest, axis=0), LOG2_E / temperature
        if (top_k <= 0) | (top_k >= vocab):
            top_k = 0
        if (top_k > 0) | (top_p < 1.0):
            total = tl.zeros([], tl.float64)
            if top_k == 0:
                total = amount((logits, vocab, peak, steepness, min_p), ALL, True, lanes)
            tl.store(noted + tl.arange(0, lanes), highest)
            tl.debug_barrier()  # what one lane has stored, another reads
            if top_k > 0:
                floor = cut((noted, lanes, peak, steepness, min_p), ALL, top_k.to(tl.float64), False, lanes)
            else:
                floor = cut((noted, lanes, peak, steepness, min_p), ALL, top_p * total, True, lanes)
            left = note(logits, vocab, floor, (noted, ids), lanes, room)
            tl.debug_barrier()
            kept = tl.where(left <= room, noted, logits), tl.where(left <= room, left, vocab), peak, steepness, min_p
            key = tl.full([], ALL, tl.int64)
            if top_k > 0:
                key = cut(kept, key, top_k.to(tl.float64), False, lanes)
                total = amount(kept, key, True, lanes)
            if top_p < 1.0:
                key = cut(kept, key, top_p * total, True, lanes)
            token = pick(kept, key, where, lanes)
            if left <= room:
                token = tl.load(ids + token)
        else:
            token = pick((logits, vocab, peak, steepness, min_p), ALL, where, lanes)
    tl.store(out + row, token.to(tl.int64))


@jit
def look(logits: tl.tensor, vocab: tl.tensor, lanes: tl.constexpr) -> tl.tensor:
    """Each lane's highest logit, the first position of the maximum, and a count of broken logits (NaN, infinite)."""
    lane = tl.arange(0, lanes)
    highest, places = tl.full([lanes], float("-inf"), tl.float32), tl.zeros([lanes], tl.int32)
    broken = tl.zeros([lanes], tl.int32)
    for first in range(0, vocab, lanes):
        inside = first + lane < vocab
        logit = tl.load(logits + first + lane, mask=inside, other=float("-inf"))
        broken += ((logit != logit) | (logit == float("inf"))).to(tl.int32)
        # A number for what is none, as torch's nan_to_num has it.
        sane = tl.where(logit != logit, float("-inf"), tl.minimum(tl.maximum(logit, LOWEST), HIGHEST))
        higher = inside & (sane > highest)
        highest, places = tl.where(higher, sane, highest), tl.where(higher, first + lane, places)
    peak = tl.max(highest, axis=0)
    best = tl.min(tl.where(highest == peak, places, vocab), axis=0)
    return highest, best, tl.sum(broken, axis=0) + (peak <= LOWEST).to(tl.int32)


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
    logits: tl.tensor, vocab: tl.tensor, floor: tl.tensor, into: tl.tensor, lanes: tl.constexpr, room: tl.constexpr
) -> tl.tensor:
    """Write the logits and ids that reach the floor, in order, as far as they fit; return the number of all."""
    noted, ids = into
    lane = tl.arange(0, lanes)
    count = tl.zeros([], tl.int32)
    for first in range(0, vocab, lanes):
        logit = tl.load(logits + first + lane, mask=first + lane < vocab, other=float("-inf"))
        reaches = ((first + lane < vocab) & (key_of(logit) >= floor)).to(tl.int32)
        place = count + tl.cumsum(reaches, axis=0) - 1
        fits = (reaches > 0) & (place < room)
        tl.store(noted + place, logit, mask=fits)
        tl.store(ids + place, first + lane, mask=fits)
        count += tl.sum(reaches, axis=0)
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
