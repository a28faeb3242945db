"""A runner that computes nothing: it takes the time a model would take and draws tokens that anyone can draw again.

A token depends on the prompt, the seed and its position in the output alone, or on the request's script, so a request
that moves to another replica goes on with the same text. Sampling parameters that shape a distribution have nothing to
shape here and are ignored.
"""

import math
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from events.blocks import TOKEN_BYTES
from replica.config import SimulatedConfig
from replica.grammar.matcher import boolean
from replica.messages import Sampling, TokenLogprobs
from replica.runners.clock import Clock
from replica.runners.request import Request, Scheduled
from replica.runners.runner import ImmediateRunner, SampledToken

BYTES = (0, 256)
# A replica without a tokenizer babbles these: about as many vowels and spaces as English has.
CLOSING = (b'"', b"}", b"]")
LETTERS = b"eeeeetttaaaoooiiinnnsshhrrdllucmfwgypbvk      ,."


class SimulatedRunner(ImmediateRunner):
    def __init__(
        self, speed: SimulatedConfig, clock: Clock, vocabulary: tuple[int, int], eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.speed = speed
        self.clock = clock
        self.first_token, self.end_token = vocabulary
        self.eos_token_ids = eos_token_ids
        self.num_blocks = 0
        self.vocab_size = 2**32  # whatever it is given
        self.attention_name = ""
        self.memory = None
        if all(token in eos_token_ids for token in range(*vocabulary)):
            raise ValueError(f"every token of the vocabulary {vocabulary} ends the output")

    def run(self, batch: Sequence[Scheduled]) -> list[SampledToken | None]:
        self.clock.sleep(self.step_s(batch))
        return [self.sample(scheduled.request) if scheduled.samples else None for scheduled in batch]

    def step_s(self, batch: Sequence[Scheduled]) -> float:
        """Seconds that a model would take (see SimulatedConfig)."""
        speed = self.speed
        prefill_tokens = sum(scheduled.tokens for scheduled in batch if scheduled.tokens > 1)
        others = max(0, sum(scheduled.tokens == 1 for scheduled in batch) - 1)
        one_pass_s = (1 + speed.batch_slowdown * others) / speed.decode_tokens_per_s
        return speed.step_overhead_s + one_pass_s + prefill_tokens / speed.prefill_tokens_per_s

    def sample(self, request: Request) -> SampledToken:
        """Draw the token that follows the known ones."""
        if request.matcher is None:
            return self.draw(request, request.generated)
        matcher = request.matcher
        matcher.follow(request.chain.tokens, request.prompt_tokens)
        drawn = self.draw(request, request.generated)
        allowed = boolean(matcher.allowed(), max(len(matcher.vocabulary.tokens), drawn.token + 1))
        stream = self._stream(request)
        is_long = 0 <= self._length(stream, request.sampling) <= request.generated
        if allowed[drawn.token] and not is_long:
            return drawn
        among = [int(token) for token in np.flatnonzero(allowed)]
        if is_long:
            texts = matcher.vocabulary.tokens
            ends = [token for token in among if token in matcher.vocabulary.eos_ids or texts[token] in CLOSING]
            among = ends or among
        return SampledToken(among[_draw(stream, request.generated) % len(among)], drawn.logprobs)

    def draw(self, request: Request, position: int) -> SampledToken:
        stream = self._stream(request)
        sampling = request.sampling
        if sampling.prompt_logprobs is not None and position == 0:
            request.prompt_logprobs = [
                self._logprobs(stream, -2 - place, token, sampling.prompt_logprobs)
                for place, token in enumerate(request.chain.tokens[1 : request.prompt_tokens])
            ]
        if self.eos_token_ids and not sampling.ignore_eos and position == self._length(stream, sampling):
            token = self.eos_token_ids[0]
        elif position < len(sampling.script) // TOKEN_BYTES:
            token = int.from_bytes(sampling.script[position * TOKEN_BYTES : (position + 1) * TOKEN_BYTES], "little")
        else:
            token = self.token(_draw(stream, position))
        if sampling.top_logprobs is None:
            return SampledToken(token)
        return SampledToken(token, self._logprobs(stream, position, token, sampling.top_logprobs))

    def _stream(self, request: Request) -> int:
        """The number that prompt and seed are, from which everything else about the output is drawn."""
        if not isinstance(request.runner_state, int):
            prompt = request.chain.tokens[: request.prompt_tokens].tobytes()
            request.runner_state = xxh3_64_intdigest(prompt, request.sampling.seed % 2**64)
        return request.runner_state

    def _length(self, stream: int, sampling: Sampling) -> int:
        """The length of an output that ends by itself: the script's, or 1 to twice the mean; -1: it does not end."""
        mean = self.speed.mean_output_tokens
        if sampling.script:
            return max(sampling.min_tokens, len(sampling.script) // TOKEN_BYTES)
        return max(sampling.min_tokens, 1 + _draw(stream, -1) % (2 * mean - 1)) if mean else -1

    def token(self, number: int) -> int:
        """A token of the vocabulary, never one that ends the output."""
        if (self.first_token, self.end_token) == BYTES:
            return LETTERS[number % len(LETTERS)]
        token = self.first_token + number % (self.end_token - self.first_token)
        while token in self.eos_token_ids:
            token = self.first_token + (token + 1 - self.first_token) % (self.end_token - self.first_token)
        return token

    def _logprobs(self, stream: int, position: int, token: int, top: int) -> TokenLogprobs:
        """Made up like the tokens: the drawn one most likely, each alternative half as likely as the one before."""
        others = dict.fromkeys(self.token(_draw(stream, position, rank)) for rank in range(1, 4 * top))
        others.pop(token, None)
        ranked = [token, *others][:top]
        return TokenLogprobs(
            math.log(0.5),
            [(alternative, -(place + 1) * math.log(2)) for place, alternative in enumerate(ranked)],
            rank=1,
        )


def _draw(stream: int, position: int, rank: int = 0) -> int:
    return xxh3_64_intdigest((position << 8 | rank).to_bytes(9, "little", signed=True), stream)
