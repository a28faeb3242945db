"""Turns bodies into prompts, for one model: with its own tokenizer and template, or approximately.

A draft is made on the event loop: everything but the encoding of new text. If there is much of that, the caller
finishes the draft on a thread.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from msgspec import Struct

from api.errors import ApiError, invalid
from api.generation_apis import APIS, COMPLETIONS, GenerationApi
from api.native import unpack_ids
from api.openai.requests import ChatRequest
from api.prompts.breakpoints import asks_for_retention, breakpoints, retained
from api.prompts.prompts import Prompts
from api.retention import Breakpoint, common_packed, tokens_within
from api.tokens.tokenizer import Tokenizer
from engines import profile_of
from engines.prompts import dates
from engines.prompts.asked import Asked, Text
from events.blocks import TOKEN_BYTES, pack_tokens
from router.prompts.piece_cache import LookUp, PieceCache, best_cut, difference, tries
from router.prompts.prompt import Peek, Prompt, approximate
from router.prompts.shapes import DIFFERS, NOT_THERE, Oddities, Shapes, oddities
from router.prompts.tokenizer_probe import conversations

log = logging.getLogger(__name__)

CACHE_BYTES = 64 * 1024 * 1024
COMPARE_EVERY = 1000  # one prompt in this many is also encoded as a whole
# About a millisecond of work each; for more, other clients' streams should not have to wait.
QUICK_TEXT_BYTES = 3 * 1024  # the bytes that are quick to encode
QUICK_TEXT_BYTES_OF_FAST = 16 * 1024  # for an encoder that takes a twentieth, but is compared with the other at times
QUICK_BODY_BYTES = 64 * 1024  # the bytes that are quick to read, check and render
QUICK_APPROXIMATE_BYTES = 1024 * 1024  # the bytes that are quick to read and hash

UNFOLLOWED = "how its engine builds the prompt of a chat is not known here"

Found: TypeAlias = LookUp | Text


class Tokens:
    """Makes prompts of bodies for one model. Safe to use from several threads."""

    def __init__(
        self,
        model: str,
        prompts: Prompts | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
        strict: bool = True,
        compare_every: int = COMPARE_EVERY,
        why_not: str = "it has no tokenizer here",
        engine: str = "",
    ) -> None:
        """`strict`: refuse what our own request types refuse; otherwise leave that to the replica's engine.

        `why_not` is the reason if there are no `prompts`. `engine`: whose way of building prompts is followed; for one
        that is known, only requests of verified shapes are exact.
        """
        self.model = model
        self.prompts = prompts
        self.why_not = why_not if prompts is None else None  # None: prompts are exact
        self.approximated = Counter[str]()  # prompts that were matched by their bytes, by reason
        self.cache: PieceCache | None = None
        self.why_no_cache: str | None = None
        self.strict = strict
        profile = profile_of(engine)
        follow, self.question = (None, None) if strict else (profile.prompts, profile.question)
        self.engine = None if follow is None or prompts is None else follow(prompts)
        self.shapes = None if follow is None else Shapes()
        self._compare_every = compare_every
        self._drafts = 0
        self.special_ids: tuple[bytes, bytes] | None = None  # the tokens that `add_special_tokens` puts around
        if prompts is None:
            return
        if not cache_bytes:
            self.why_no_cache = "it is switched off"
            return
        shown = conversations(prompts)
        cut = best_cut(prompts.tokenizer.cuts, max(shown, key=len, default="".join(prompts.tokenizer.cuts)))
        if cut is None:
            self.why_no_cache = f"{prompts.tokenizer.name} has no special token that texts can be cut at"
            return
        different = difference(prompts.tokenizer, cut, tries(cut, shown, prompts.tokenizer.cuts[:8]))
        if different is not None:
            self.distrust_cache(prompts.tokenizer, different)
            return
        self.cache = PieceCache(prompts.tokenizer, cut, cache_bytes)
        self.special_ids = _special_ids(prompts.tokenizer)

    def go_approximate(self, why: str) -> None:
        """Make no more exact prompts, because the replicas' tokens differ from ours."""
        if self.why_not is None:
            log.warning("%s: matching prompts approximately from now on: %s", self.model, why)
        self.why_not = why
        self.cache = None

    def is_quick(self, body: bytes) -> bool:
        """Return whether drafting is fast enough for the event loop; `Draft.is_quick` covers the rest of the work."""
        return len(body) <= (QUICK_BODY_BYTES if self.why_not is None else QUICK_APPROXIMATE_BYTES)

    def draft(
        self,
        api: str,
        body: bytes,
        peek: Peek,
        lora: str | None = None,
        salt: str | None = None,
        max_model_len: int | None = None,
    ) -> "Draft":
        """Draft a prompt; if strict, raise ApiError as a replica would. `salt` is the one sent to the replica."""
        prompts, engine, own = self.prompts, self.engine, APIS.get(api)
        named = Named(self.model, peek, lora, salt)
        if self.why_not is not None or prompts is None:
            return ready(self._approximate(named, self.why_not or ""))
        try:
            if engine is not None:
                asked = engine.read(api, body, max_model_len)
            elif own is not None and (self.strict or own.is_inner):
                asked = _asked(prompts, body, own, self.strict, max_model_len)
            else:
                why = f"how its engine builds a prompt of /v1/{api} is not known here"
                return ready(self._approximate(named, why, f"api: {api}"))
        except ApiError as error:
            return ready(self.refused(named, error))
        compare = self.cache is not None and self._drafts % self._compare_every == 0
        self._drafts += 1
        encoding = Encoding(self, prompts, named, asked, api != COMPLETIONS.name, self.cache, compare)
        most = QUICK_TEXT_BYTES_OF_FAST if prompts.tokenizer.is_fast else QUICK_TEXT_BYTES
        return Draft(encoding.unknown_bytes <= most, encoding.finish)

    def _approximate(self, named: "Named", why: str, reason: str = "model") -> Prompt:
        return approximate(self.model, named.peek, named.lora, named.salt, why, reason)

    def verdict(
        self, shape: str | None, peek: Peek, dated_s: float | None, *, read_apart: bool = False
    ) -> tuple[str | None, str | None]:
        """The reason why a prompt of this shape is approximate, or else why it is not called exact."""
        if shape is None or self.shapes is None:
            return None, None
        if dated_s is not None and self.shapes.other_date(dated_s):
            return dates.OTHER_DATE, None
        why = self.shapes.why_not(shape, partial(self._oddities, peek, read_apart))
        if why is None:
            return None, None
        silent = self.shapes.silent
        return (why, None) if silent is None or why is DIFFERS else (None, silent)

    def odd(self, prompt: Prompt) -> Oddities:
        return self._oddities(prompt.peek, prompt.read_apart)

    def _oddities(self, peek: Peek, read_apart: bool) -> Oddities:
        special = () if self.prompts is None else self.prompts.tokenizer.special_texts
        return oddities(peek, special, read_apart=read_apart)

    def is_verified_at(self, prompt: Prompt, process: str) -> bool:
        """Tell whether the prompt's shape is verified at the chosen replica; note in the prompt if only at others."""
        if self.shapes is None or prompt.shape is None:
            return True
        why = None if self.shapes.is_verified_at(prompt.shape, process) else NOT_THERE
        if why is None and not self.shapes.has_date(process, prompt.dated_s, time.time()):
            why = dates.SHOWS_DATE
        if prompt.exact and prompt.doubt in (None, NOT_THERE, dates.SHOWS_DATE):  # an attempt elsewhere has verified it
            prompt.doubt = why
        return why is None

    def made(self, named: "Named", packed: list[bytes], asked: Asked) -> Prompt:
        """The prompt of these tokens, as far as its shape is verified."""
        why, doubt = self.verdict(asked.shape, named.peek, asked.dated_s)
        doubt = doubt or asked.doubt
        if why is not None:
            prompt = self._approximate(named, why, "shape")
            prompt.unverified = packed[0]
        else:
            length, choices = len(packed[0]) // TOKEN_BYTES, len(packed) * asked.choices
            prompt = Prompt(named.model, length, packed, True, None, choices, named.lora, named.salt, named.peek, {})
            prompt.all_tokens = sum(map(len, packed)) // TOKEN_BYTES
            prompt.reason = None if doubt is None else "unverified"
        prompt.shape, prompt.doubt, prompt.dated_s = asked.shape, doubt, asked.dated_s
        return prompt

    def refused(self, named: "Named", error: ApiError) -> Prompt:
        if self.strict:
            try:
                raise error
            finally:
                del error  # its traceback makes a cycle, which would keep the body until it is collected
        param = re.match(r"\w*", error.param or "")
        reason = f"refused: {param[0] if param else ''}"
        return self._approximate(named, error.message, reason)

    def distrust_cache(self, tokenizer: Tokenizer, text: str) -> None:
        self.cache = None
        if self.why_no_cache is None:
            self.why_no_cache = f"{tokenizer.name} encodes a text in pieces differently"
            log.error("%s: %s, first seen in a text of %d characters", self.model, self.why_no_cache, len(text))


class Named(Struct, frozen=True):
    """The parts of a prompt's root key (model, adapter, salt), and the fields read of the request."""

    model: str
    peek: Peek
    lora: str | None
    salt: str | None


class Draft(Struct, frozen=True):
    """A prompt complete but for its encoding; call `finish` once, on any thread."""

    is_quick: bool
    finish: Callable[[], Prompt]


def ready(prompt: Prompt) -> Draft:
    return Draft(True, lambda: prompt)


class Encoding(Struct):
    """The texts of one request on their way to token ids."""

    tokens: Tokens
    prompts: Prompts
    named: Named
    asked: Asked
    chat: bool
    cache: PieceCache | None
    compare: bool
    found: list[Found] = []
    ended: dict[Breakpoint, Found] = {}
    unknown_bytes: int = 0

    def __post_init__(self) -> None:
        asked = self.asked
        if asked.special_tokens and self.tokens.special_ids is None:
            self.cache = None
        self.found = [self._look_up(text) for text in asked.texts]
        self.ended = {point: self._look_up(text) for point, text in asked.ended.items()}
        self.unknown_bytes = sum(
            found.unknown_bytes if isinstance(found, LookUp) else len(found) if isinstance(found, str) else 0
            for found in (*self.found, *self.ended.values())
        )
        if self.compare:
            self.unknown_bytes += sum(len(text) for text in asked.texts if isinstance(text, str))

    def _look_up(self, text: Text) -> Found:
        return self.cache.look_up(text) if self.cache is not None and isinstance(text, str) else text

    def finish(self) -> Prompt:
        packed = [self._packed(found) for found in self.found]
        if self.compare:  # encode each text as a whole; on a difference, use that and stop using the cache
            for i, text in enumerate(self.asked.texts):
                if isinstance(text, str) and packed[i] != (whole := self._whole(text)):
                    packed[i] = whole
                    self.tokens.distrust_cache(self.prompts.tokenizer, text)
        if not all(packed):
            where = f"prompt[{packed.index(b'')}]" if len(packed) > 1 else "prompt"
            param = "messages" if self.chat else where
            return self.tokens.refused(self.named, invalid(f"{param} is empty; send at least one token", param))
        prompt = self.tokens.made(self.named, packed, self.asked)
        if prompt.exact and self.asked.retaining is not None:

            def tokens_before(point: Breakpoint) -> int:
                found = self.ended[point]
                if isinstance(found, str):
                    return tokens_within(self.prompts.tokenizer, unpack_ids(packed[0]), found)
                return common_packed(packed[0], self._packed(found))

            prompt.retain = retained(self.asked.retaining, prompt.tokens, tokens_before)
        return prompt

    def _packed(self, found: Found) -> bytes:
        if isinstance(found, str):
            return self._whole(found)
        if isinstance(found, list):
            return pack_tokens(found)
        assert self.cache is not None, "it was looked up there"
        packed = self.cache.encode(found)
        around = self.tokens.special_ids if self.asked.special_tokens else None
        return packed if around is None else b"".join((around[0], packed, around[1]))

    def _whole(self, text: str) -> bytes:
        return pack_tokens(self.prompts.tokenizer.encode(text, add_special_tokens=self.asked.special_tokens))


def _asked(prompts: Prompts, body: bytes, api: GenerationApi, strict: bool, max_model_len: int | None) -> Asked:
    """Read a request as our own engine does."""
    request, _ = api.read(body)
    if not strict:
        request.prompt_token_ids = None  # a field of our own, which other engines do not know
    if isinstance(request, ChatRequest):
        asked = Asked([prompts.chat_text(request, max_model_len)], request.n, bool(request.add_special_tokens))
        if strict and asks_for_retention(request):  # other engines do not know it
            asked.retaining = request
            asked.ended = {point: prompts.text_ended_at(request, point) for point in breakpoints(request)}
        asked.doubt = None if strict else UNFOLLOWED
        return asked
    return Asked(prompts.completion_texts(request, max_model_len), request.n, request.add_special_tokens is not False)


def _special_ids(tokenizer: Tokenizer) -> tuple[bytes, bytes] | None:
    """The ids that `add_special_tokens` puts before and after a text; None if it does more than that."""
    pairs = [
        (tokenizer.encode(text, add_special_tokens=True), tokenizer.encode(text, add_special_tokens=False))
        for text in ("a b", "", " ", "\n1", "é<")
    ]
    whole, plain = pairs[0]
    for start in range(len(whole) - len(plain) + 1):
        before, after = whole[:start], whole[start + len(plain) :]
        if all(whole == [*before, *plain, *after] for whole, plain in pairs):
            return pack_tokens(before), pack_tokens(after)
    return None
