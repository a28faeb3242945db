"""Counters of a replica, summed over its models, and their increase since an earlier moment."""

from collections.abc import Sequence
from itertools import accumulate
from operator import add

from api.http.prometheus import FIRST_TOKEN_S
from router.members.members import Member
from router.members.tally import Tally
from router.responses import PromptCounts

FAILED = 500  # this status and those above
_NONE = (0,) * (len(FIRST_TOKEN_S) + 1)


class ReplicaCounts(PromptCounts):
    """Counters that only grow until the replica is replaced."""

    requests: int = 0
    errors: int = 0
    reported_tokens: int = 0
    compared_tokens: int = 0  # prompt tokens of the responses that reported cached tokens
    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    first_token: Sequence[int] = _NONE  # histogram of the time to first token, by FIRST_TOKEN_S
    saved_s: float = 0.0  # seconds of prefill that these saved
    generated_tokens: int = 0
    streamed_tokens: int = 0
    streaming_s: float = 0.0

    def count(self, tally: Tally, block_size: int) -> None:
        for status, requests in tally.statuses.items():
            self.requests += requests
            if status >= FAILED:
                self.errors += requests
        self.errors += tally.broken
        self.reported_tokens += tally.reported_blocks * block_size
        for name in (*PromptCounts.__struct_fields__, "compared_tokens", "saved_s"):
            setattr(self, name, getattr(self, name) + getattr(tally, name))
        counts = tally.first_token_s.counts
        self.first_token = counts.copy() if self.first_token is _NONE else list(map(add, self.first_token, counts))

    def add(self, other: "ReplicaCounts") -> None:
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.first_token is not _NONE:
            self.first_token = list(map(add, self.first_token, other.first_token))

    def since(self, before: "ReplicaCounts") -> "ReplicaCounts":
        """Return the increase, nothing of which is negative.

        Counters fall where a worker that hangs is missing from the sum, a stream starts over, or blocks change size.
        """
        grown = {name: max(0, getattr(self, name) - getattr(before, name)) for name in (*SUMS, *OF_EVENTS)}
        if self.requests == before.requests:
            return ReplicaCounts(**grown)
        pairs = zip(self.first_token, before.first_token, strict=True)
        return ReplicaCounts(**grown, first_token=[max(0, now - then) for now, then in pairs])

    # ---- shares and quantiles

    def hit_predicted(self) -> float | None:
        """The share of prompt tokens predicted to be cached."""
        return round(self.matched_tokens / self.prompt_tokens, 4) if self.prompt_tokens else None

    def hit_reported(self) -> float | None:
        """The share of prompt tokens reported as cached; None if no response reported any."""
        if not self.compared_tokens:
            return None
        return round(min(1.0, self.reported_tokens / self.compared_tokens), 4)

    def token_s(self) -> float | None:
        """The mean time of a token after the first one of a streamed answer."""
        return round(self.streaming_s / self.streamed_tokens, 6) if self.streamed_tokens else None

    def ttft_s(self, share: float) -> float | None:
        """A quantile of the time to first token, interpolated within its bucket."""
        total = sum(self.first_token)
        if not total:
            return None
        wanted, low_s, before = share * total, 0.0, 0
        for reached, bound_s in zip(accumulate(self.first_token), FIRST_TOKEN_S, strict=False):
            if reached >= wanted:
                return round(low_s + (bound_s - low_s) * (wanted - before) / (reached - before), 6)
            low_s, before = bound_s, reached
        return FIRST_TOKEN_S[-1]


OF_EVENTS = ("batches", "stored_blocks", "removed_blocks")  # every worker counts the same ones
SUMS = tuple(name for name in ReplicaCounts.__struct_fields__ if name not in (*OF_EVENTS, "first_token"))


def counts_of(member: Member) -> ReplicaCounts:
    counts = ReplicaCounts()
    for tally in member.tallies.values():
        counts.count(tally, member.block_size)
    output = member.output
    counts.generated_tokens = output.tokens
    counts.streamed_tokens, counts.streaming_s = output.streamed_tokens, output.streaming_s
    if member.feed is not None:
        counts.batches = member.feed.view.stream.stats.batches
        counts.stored_blocks, counts.removed_blocks = member.feed.stored, member.feed.removed
    return counts
