"""Log probabilities of a prompt's tokens, row by row of the steps that compute it."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from replica.model.transformer import Transformer
from replica.request import Scheduled
from replica.sampling import token_logprobs

LOGITS_AT_ONCE = 1 << 23


def keep(model: Transformer, ordered: Sequence[Scheduled], hidden: Tensor, last_rows: Sequence[int]) -> None:
    """Each row of a prompt says how likely its next token was; the last one's next token is no prompt's."""
    for scheduled, last_row in zip(ordered, last_rows, strict=True):
        request = scheduled.request
        wanted = request.sampling.prompt_logprobs
        if wanted is None or request.generated:
            continue
        start, rows = scheduled.start, min(scheduled.tokens, request.prompt_tokens - 1 - scheduled.start)
        first_row = last_row + 1 - scheduled.tokens
        for logits, begin in _logits_in_chunks(model, hidden[first_row : first_row + rows]):
            first = start + begin + 1
            followers = request.chain.tokens[first : first + len(logits)]
            request.prompt_logprobs += token_logprobs(logits, list(followers), wanted)


def _logits_in_chunks(model: Transformer, hidden: Tensor) -> Iterator[tuple[Tensor, int]]:
    """All logits of a long prompt would be gigabytes."""
    size = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    for begin in range(0, len(hidden), size):
        yield model.logits(hidden[begin : begin + size]), begin
