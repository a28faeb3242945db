"""The prompt at the head of a completion (`echo`): its text, and its log probabilities if they are wanted."""

from collections.abc import Generator, Sequence

from api.responses import CompletionLogprobs, add_first_token, add_logprob
from api.tokens.detokenize import Detokenizer
from api.tokens.tokenizer import Tokenizer
from replica.messages import TokenLogprobs


def echoed_text(tokenizer: Tokenizer, given: str | list[int], skip_special_tokens: bool) -> str:
    """The prompt as the client wrote it; token ids as text."""
    return given if isinstance(given, str) else tokenizer.decode(given, skip_special_tokens=skip_special_tokens)


def echoed_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    told: Sequence[TokenLogprobs],
    alternatives: int,
    detokenizer: Detokenizer,
    pause_every: int,
) -> Generator[None, None, CompletionLogprobs]:
    """Return the prompt's log probabilities in the form of a completion's; yield so that others have their turn."""
    logprobs = CompletionLogprobs([], [], [], [])
    add_first_token(logprobs, tokenizer, token_ids[0])
    text_offset = len(detokenizer.feed(token_ids[:1]))
    for count, (token_id, of_token) in enumerate(zip(token_ids[1:], told, strict=True), start=1):
        add_logprob(logprobs, tokenizer, (token_id, of_token.logprob, of_token.top[:alternatives]), text_offset)
        text_offset += len(detokenizer.feed((token_id,)))
        if count % pause_every == 0:
            yield
    return logprobs


def joined(echoed: CompletionLogprobs, generated: CompletionLogprobs, echoed_characters: int) -> CompletionLogprobs:
    """The prompt's log probabilities, followed by those of what was generated."""
    return CompletionLogprobs(
        [*echoed.text_offset, *(echoed_characters + offset for offset in generated.text_offset)],
        [*echoed.token_logprobs, *generated.token_logprobs],
        [*echoed.tokens, *generated.tokens],
        [*echoed.top_logprobs, *generated.top_logprobs],
    )
