"""From logits to tokens, with the semantics of vLLM's V1 sampler. Imported by the engine's process only.

What a row draws depends on that row and its request alone, to the last bit: sums and exponentials are of one row at a
time, and what happens on many at once (maxima, the largest k, comparisons, arithmetic of single elements) comes out the
same wherever an element stands. Whatever is made faster must keep that.
"""

import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from replica.grammar.matcher import boolean
from replica.messages import TokenLogprobs
from replica.runners.request import Request, Scheduled, is_penalized
from replica.runners.runner import SampledToken
from replica.transformer import Transformer

log = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5  # vLLM has this limit for the temperature, too
CANDIDATES = (1024, 16384)  # the largest weights, among which a nucleus ends, mostly
CHUNK_LOGITS = 2**23  # log probabilities look at this many together: 32 MB
LOGITS_AT_ONCE = 2**23  # a prompt's log probabilities look at this many
HIGHEST = torch.finfo(torch.float32).max
LOWEST = torch.finfo(torch.float32).min
TINIEST = torch.finfo(torch.float32).tiny


def sample(logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
    """The next token of each request; row i of the logits is that of request i, and is masked in place."""
    ruled_out = rule_out(logits, requests)
    peaks, best = logits.max(dim=-1)
    tokens: list[int] = best.tolist()
    for row, (request, peak) in enumerate(zip(requests, peaks.tolist(), strict=True)):
        if not math.isfinite(peak):
            # The model failed: the other requests must go on, and this one does so for as long as it makes sense.
            _tell_of_broken()
            forbidden = ruled_out.get(row)
            numbers = torch.nan_to_num(logits[row], nan=-math.inf if forbidden is None else LOWEST)
            tokens[row] = int((numbers if forbidden is None else numbers.masked_fill_(forbidden, -math.inf)).argmax())
        elif request.sampling.temperature >= GREEDY_BELOW or is_shaped(request, request.generated):
            tokens[row] = _draw(logits[row], request, tokens[row])
    logprobs = logprobs_of(logits, tokens, requests)
    return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def is_shaped(request: Request, generated: int) -> bool:
    """Return True if the client biases the logits of the token after so many."""
    return bool(request.sampling.logit_bias) or is_penalized(request.sampling) or _may_not_stop(request, generated)


def _may_not_stop(request: Request, generated: int) -> bool:
    # vLLM does so, too: this many tokens come first. (The scheduler would let the last of these be a stop token.)
    return generated < request.sampling.min_tokens and bool(request.sampling.stop_token_ids)


@cache
def _tell_of_broken() -> None:
    log.error("the model computed non-finite logits; affected requests continue with their likeliest token")


def _draw(row: Tensor, request: Request, otherwise: int) -> int:
    """One row's token; `otherwise` if nothing may be drawn because every token would end the output too early."""
    sampling = request.sampling
    generated = request.generated
    logits = shaped(row.unsqueeze(0), [request], [generated])[0] if is_shaped(request, generated) else row
    peak, best = logits.max(dim=0)
    if peak == -math.inf:
        return otherwise
    if sampling.temperature < GREEDY_BELOW:
        return int(best)
    ids = None
    if 0 < sampling.top_k < len(logits):  # the k largest, and all that equal the last of these; their ids ascend
        cutoff = logits.topk(sampling.top_k, sorted=False).values.min()
        ids = (logits >= cutoff).nonzero().squeeze(1)
        logits = logits[ids]
    # It is float64, so that no temperature makes an infinity of a logit. The largest weight is 1.
    weights = (logits.double() - peak.double()).div_(sampling.temperature).exp_()
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0
    if sampling.top_p < 1:
        weights[weights < _nucleus_end(weights, sampling.top_p)] = 0
    place = pick(weights, uniform(sampling.seed, generated))
    return place if ids is None else int(ids[place])


# ---- which tokens may come next


def bits_of(requests: Sequence[Request]) -> dict[int, NDArray[np.uint8]]:
    """The constrained ones, by their places; each with a bit for every token that may come next."""
    found: dict[int, NDArray[np.uint8]] = {}
    for place, request in enumerate(requests):
        if (matcher := request.matcher) is not None:
            matcher.follow(request.chain.tokens, request.prompt_tokens)
            found[place] = matcher.allowed()
    return found


def rule_out(logits: Tensor, requests: Sequence[Request]) -> dict[int, Tensor]:
    """Mask the rows of constrained requests; return by row which tokens may not come next."""
    bits = bits_of(requests)
    if not bits:
        return {}
    ruled_out = torch.from_numpy(~boolean(np.stack(list(bits.values())), logits.shape[-1]))
    rows = torch.tensor(list(bits))
    logits[rows] = logits[rows].masked_fill_(ruled_out, -math.inf)
    return dict(zip(bits, ruled_out, strict=True))


# ---- what the client adds to the logits


def shaped(rows: Tensor, requests: Sequence[Request], generated: Sequence[int]) -> Tensor:
    """Each with bias, without tokens that would end the output too early, and with penalties, in this order."""
    logits = rows.clone()
    flat, vocab = logits.view(-1), logits.shape[1]
    starts = range(0, len(flat), vocab)
    bias = {
        start + token: value
        for start, request in zip(starts, requests, strict=True)
        for token, value in request.sampling.logit_bias.items()
        if token < vocab
    }
    if bias:
        flat[_ids(bias, flat)] += torch.tensor(list(bias.values()), device=flat.device, dtype=flat.dtype)
    too_early = [
        start + token
        for start, request, count in zip(starts, requests, generated, strict=True)
        if _may_not_stop(request, count)
        for token in request.sampling.stop_token_ids
        if token < vocab
    ]
    if too_early:
        flat[_ids(too_early, flat)] = -math.inf
    seen: dict[int, Seen] = {}
    penalties = []
    for start, request in zip(starts, requests, strict=True):
        if is_penalized(request.sampling):
            # A chain only grows, preempted or not; so the part that was taken over stays right.
            if not isinstance(request.runner_state, Seen):
                request.runner_state = Seen(request)
            request.runner_state.take(request)
            if request.runner_state.ids:
                seen[start] = request.runner_state
                factor = min(max(request.sampling.repetition_penalty, TINIEST), HIGHEST)
                penalties.append((factor, request.sampling.frequency_penalty, request.sampling.presence_penalty))
    if seen:
        _penalize(flat, seen, penalties)
    return logits


def _ids(tokens: Sequence[int] | dict[int, float], like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), device=like.device, dtype=torch.int64)


class Seen:
    """The distinct tokens of a request so far, in order of appearance, and how often each is in the output.

    The prompt's are here only where they count.
    """

    __slots__ = ("counts", "ids", "places", "taken")

    def __init__(self, request: Request) -> None:
        with_prompt = request.sampling.repetition_penalty != 1
        self.taken = 0 if with_prompt else request.prompt_tokens  # this many tokens of the chain are looked at
        self.places: dict[int, int] = {}
        self.ids = array("q")
        self.counts = array("f")

    def take(self, request: Request) -> None:
        tokens = request.chain.tokens
        for position in range(self.taken, len(tokens)):
            place = self.places.setdefault(tokens[position], len(self.ids))
            if place == len(self.ids):
                self.ids.append(tokens[position])
                self.counts.append(0)
            if position >= request.prompt_tokens:
                self.counts[place] += 1
        self.taken = len(tokens)


def _penalize(flat: Tensor, seen: Mapping[int, Seen], penalties: Sequence[tuple[float, float, float]]) -> None:
    """By where their rows start; for each the factor, and what is taken off by frequency and by presence."""
    counts_of = [len(one.ids) for one in seen.values()]
    places = np.concatenate([np.frombuffer(one.ids, np.int64) + start for start, one in seen.items()])
    counts = np.concatenate([np.frombuffer(one.counts, np.float32) for one in seen.values()])
    of_place = np.concatenate((counts[np.newaxis], np.repeat(np.array(penalties, np.float32).T, counts_of, axis=1)))
    ids = torch.from_numpy(places).to(flat.device)
    often, factor, frequency, presence = torch.from_numpy(of_place).to(flat.device)
    values = flat[ids]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= frequency * often
    values -= presence * (often > 0)
    flat[ids] = values.clamp_(max=HIGHEST)


# ---- the candidates, and the draw


def _nucleus_end(weights: Tensor, top_p: float) -> Tensor | float:
    """The smallest weight of the fewest largest ones that together have `top_p` of the whole."""
    wanted = top_p * weights.sum()
    for count in (*(few for few in CANDIDATES if few < len(weights)), len(weights)):
        largest = weights.topk(count).values
        place = int(torch.searchsorted(largest.cumsum(dim=0), wanted))
        if place < len(largest):
            return largest[place]
    return 0.0  # the sums are rounded, and `wanted` is nearly everything


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at this position of the output."""
    # Both are hashed: as the hash's own seed, numbers that share their low half would share their draws.
    name = position.to_bytes(8, "little") + (seed % 2**64).to_bytes(8, "little")
    return (xxh3_64_intdigest(name) >> 11) * 2.0**-53


def pick(weights: Tensor, where: float) -> int:
    """The place whose share of the whole, counted from the first, holds this point of [0, 1); never one of weight 0."""
    sums = weights.cumsum(dim=0)
    place = int(torch.searchsorted(sums, where * sums[-1], right=True))
    if place == len(weights) or weights[place] == 0:
        place = int(weights.nonzero()[-1])
    return place


# ---- log probabilities


def token_logprobs(logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log probabilities of one token of each row, and of the `top` likeliest, ties by their ids."""
    rows = max(1, CHUNK_LOGITS // logits.shape[-1])
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), rows):
        chunk, ids = logits[start : start + rows].float(), token_ids[start : start + rows]
        sums = torch.stack([row.double().logsumexp(dim=0) for row in chunk])
        broken = ~sums.isfinite().unsqueeze(1)
        if broken.any():
            _tell_of_broken()
            chunk = torch.where(broken, torch.nan_to_num(chunk, nan=LOWEST, posinf=HIGHEST, neginf=LOWEST), chunk)
            sums = torch.stack([row.double().logsumexp(dim=0) for row in chunk])
        chosen = chunk.gather(1, _ids(ids, chunk).unsqueeze(1))
        ranks = (chunk > chosen).sum(dim=1) + 1
        logprobs = chosen.squeeze(1).double() - sums
        found += map(TokenLogprobs, logprobs.tolist(), _alternatives(chunk, sums, top), ranks.tolist())
    return found


def _alternatives(logits: Tensor, sums: Tensor, top: int) -> list[list[tuple[int, float]]]:
    top = min(top, logits.shape[-1])
    if not top:
        return [[] for _ in logits]
    # One more than is wanted: where it equals the last, `topk` may have taken any of several.
    values, ids = logits.topk(min(top + 1, logits.shape[-1]), dim=-1)
    logprobs = (values.double() - sums.unsqueeze(1)).tolist()
    tied = (values[:, top - 1 : top] == values[:, top:]).any(dim=1).tolist()
    found: list[list[tuple[int, float]]] = []
    for row, (row_ids, row_logprobs) in enumerate(zip(ids.tolist(), logprobs, strict=True)):
        pairs = list(zip(row_ids, row_logprobs, strict=True))
        if tied[row]:
            last = values[row, top - 1]
            equal = (logits[row] == last).nonzero().squeeze(1)[:top].tolist()
            pairs = [pair for pair in pairs if pair[1] > row_logprobs[top - 1]]
            pairs += [(token, row_logprobs[top - 1]) for token in equal]
        found.append(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:top])
    return found


def logprobs_of(logits: Tensor, tokens: Sequence[int], requests: Sequence[Request]) -> dict[int, TokenLogprobs]:
    """Return log probabilities by row, for requests that ask for them."""
    wanted = {row: top for row, request in enumerate(requests) if (top := request.sampling.top_logprobs) is not None}
    if not wanted:
        return {}
    chosen = logits if len(wanted) == len(requests) else logits[_ids(list(wanted), logits)]
    found = token_logprobs(chosen, [tokens[row] for row in wanted], max(wanted.values()))
    return {
        row: TokenLogprobs(logprobs.logprob, logprobs.top[:top], logprobs.rank)
        for (row, top), logprobs in zip(wanted.items(), found, strict=True)
    }


def keep_prompt_logprobs(
    model: Transformer, ordered: Sequence[Scheduled], hidden: Tensor, last_rows: Sequence[int]
) -> None:
    """Each row of a prompt says how likely its next token was; the last one's next token is no prompt's."""
    for scheduled, last_row in zip(ordered, last_rows, strict=True):
        request = scheduled.request
        wanted = request.sampling.prompt_logprobs
        if wanted is None or request.generated:
            continue
        start, rows = scheduled.start, min(scheduled.tokens, request.prompt_tokens - 1 - scheduled.start)
        first_row = last_row + 1 - scheduled.tokens
        size = max(1, LOGITS_AT_ONCE // model.config.vocab_size)  # all logits of a long prompt would be gigabytes
        for begin in range(0, rows, size):
            logits = model.logits(hidden[first_row + begin : first_row + min(begin + size, rows)])
            first = start + begin + 1
            followers = request.chain.tokens[first : first + len(logits)]
            request.prompt_logprobs += token_logprobs(logits, list(followers), wanted)
