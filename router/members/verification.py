"""Asks replicas, beside the traffic, for the tokens of requests whose shapes are not verified there.

Clients cause these questions, so they are few: so many at once, so many per second, of bodies up to a size. What is
not asked about now stays approximate, and the next request of its shape asks again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from api.errors import ApiError
from api.native import unpack_ids
from api.process.tasks import end
from engines.prompts import dates
from events.blocks import TOKEN_BYTES, block_keys, extend_keys, pack_tokens, root_key
from router.members.broken import Broken
from router.members.fetch import Fetched
from router.members.members import Member, ServedModel, Server
from router.placement.index import APPROXIMATE
from router.placement.placement import Placement
from router.prompts.pictures import extras_of
from router.prompts.prompt import Prompt
from router.prompts.shapes import PLAIN, Difference, Odd, Shapes, difference
from router.prompts.tokenizer_probe import Probe, token_ids_in
from router.prompts.tokens import Tokens

log = logging.getLogger(__name__)

MAX_AT_ONCE = 4
PER_SECOND, AT_A_STRETCH = 5.0, 20.0  # questions
MAX_BODY_BYTES = 256 * 1024  # an engine tokenizes this in a tenth of a second
ANSWER_S = 10.0
GREETING = {"role": "user", "content": "Hi"}
STORED_WITHIN_S = 10.0  # the time from the question to the events of the prompt's blocks
LOOK_EVERY_S = 0.1
OFF = (401, 403, 404, 405, 501)  # statuses of a route that the server does not have, or not for us


@dataclass(eq=False)
class Verification:
    """Verifies shapes. `_ask` is a POST to a replica on the router's own behalf; it raises Broken."""

    _ask: Callable[[Server, str, bytes, float], Awaitable[Fetched]]
    _placement: Placement
    _now_s: Callable[[], float]
    _shows_prompts: bool
    asked: int = 0
    _under_way: dict[tuple[str, str], asyncio.Task[None]] = field(default_factory=dict)
    _allowed: float = AT_A_STRETCH
    _allowed_at_s: float = 0.0

    def sent(self, member: Member, model: ServedModel, prompt: Prompt, api: str, body: bytes) -> None:
        """Verify the request's shape at the replica that it was sent to, unless that is known or too much to ask."""
        shapes, name = model.tokens.shapes, prompt.shape
        assert shapes is not None and name is not None, "only such prompts come here"
        about, now_s = (name, member.server.process), self._now_s()
        if not shapes.has_date(member.server.process, prompt.dated_s, time.time()):
            # Ask for a prompt of our own, unless that is known: no client has a say in what date a replica shows.
            about, quarter = ("", member.server.process), dates.quarter(time.time())
            if quarter is None or shapes.date(member.server.process, quarter) is not None or about in self._under_way:
                return
            if self._may_ask(now_s):
                self._begin(about, self._verify_date(member, model.tokens, shapes, quarter))
            return
        odd = partial(model.tokens.odd, prompt)
        if not shapes.may_ask(name, member.server.process, odd, now_s) or about in self._under_way:
            return
        if (len(body) > MAX_BODY_BYTES and not prompt.asked) or not self._may_ask(now_s):
            return
        packed = prompt.packed[0] if prompt.exact else prompt.unverified
        if packed is None:
            return
        before = self._stored(member, prompt, packed)
        self._begin(about, self._verify(member, model.tokens, prompt, packed, api, bytes(body), before))

    def _begin(self, about: tuple[str, str], asking: Coroutine[Any, Any, None]) -> None:
        task = self._under_way[about] = asyncio.get_running_loop().create_task(asking)
        task.add_done_callback(lambda _: self._under_way.pop(about, None))

    def probed(
        self, server: Server, tokens: Tokens, asked: Sequence[Probe], answers: Sequence[tuple[int, bytes]]
    ) -> None:
        """Note the shapes that the probes at a replica's start have verified."""
        shapes = tokens.shapes
        assert shapes is not None, "its engine's prompts are verified by shape"
        text_of, quarter = self._text_of(tokens), dates.quarter(time.time())
        told = [token_ids_in(body) if status == 200 else None for status, body in answers]
        compared = [
            (probe, probe.shape, difference(server.name, probe.expected, theirs, text_of))
            for probe, theirs in zip(asked, told, strict=True)
            if probe.shape is not None and theirs is not None
        ]
        dated = [found for one, _, found in compared if one.dated_s and dates.quarter(one.dated_s) == quarter]
        if dated and quarter is not None:
            self._shows(shapes, server, quarter, None if None in dated else dated[0])
        for probe, shape, found in compared:
            if not shapes.has_date(server.process, probe.dated_s, time.time()):
                continue
            if found is None:
                shapes.verified(shape, server.process, lambda: PLAIN)
            else:
                self._differs(shapes, shape, server.process, lambda: PLAIN, found)

    def other_length(self, member: Member, tokens: Tokens, prompt: Prompt, theirs: int) -> None:
        """Note that a replica's answer counts other tokens in its prompt than we do."""
        shapes, process = tokens.shapes, member.server.process
        if shapes is None or prompt.shape is None:
            return
        if shapes.has_date(process, prompt.dated_s, time.time()):
            shortest = min(theirs, prompt.tokens)
            found = Difference(member.name, shortest, f"{prompt.tokens} tokens", f"{theirs} tokens")
            self._differs(shapes, prompt.shape, process, partial(tokens.odd, prompt), found)

    def _may_ask(self, now_s: float) -> bool:
        self._allowed = min(AT_A_STRETCH, self._allowed + PER_SECOND * (now_s - self._allowed_at_s))
        self._allowed_at_s = now_s
        if self._allowed < 1 or len(self._under_way) >= MAX_AT_ONCE:
            return False
        self._allowed -= 1
        self.asked += 1
        return True

    async def close(self) -> None:
        await end(self._under_way.values())

    async def _verify(
        self, member: Member, tokens: Tokens, prompt: Prompt, packed: bytes, api: str, body: bytes, before: int
    ) -> None:
        name, shapes, process, odd = prompt.shape, tokens.shapes, member.server.process, partial(tokens.odd, prompt)
        assert name is not None and shapes is not None, "its shape is to be verified"
        try:
            theirs, unseen = await self._words(member, tokens, shapes, api, body, packed if prompt.asked else None)
        except Broken:  # its health checks will tell
            return
        except Exception:
            log.exception("%s: its tokens for a request of the shape %r could not be compared", member.name, name)
            return
        if theirs is None or member.server.process != process:
            return
        if not shapes.has_date(process, prompt.dated_s, time.time()):
            return  # a quarter of an hour has ended
        if pack_tokens(theirs) != packed:
            found = difference(member.name, unpack_ids(packed), theirs, self._text_of(tokens))
            if found is not None:
                self._differs(shapes, name, process, odd, found)
            return
        if unseen is not None:  # the engine has to store all full blocks of these tokens, some of them only now
            size, until_s = member.block_size, self._now_s() + STORED_WITHIN_S
            blocks = 0 if size == APPROXIMATE else (len(packed) // TOKEN_BYTES - 1) // size
            if before >= blocks or any(start >= blocks * size for _, start, _ in prompt.pictures):
                return  # nor do blocks without a picture prove its name
            while self._stored(member, prompt, packed) < blocks:
                await asyncio.sleep(LOOK_EVERY_S)
                if self._now_s() >= until_s or member.block_size != size:
                    return
        if member.server.process == process:
            shapes.verified(name, process, odd)
            log.debug("%s: verified: %r", member.name, name)

    async def _verify_date(self, member: Member, tokens: Tokens, shapes: Shapes, quarter: int) -> None:
        process, body = member.server.process, msgspec.json.encode({"model": tokens.model, "messages": [GREETING]})
        assert tokens.engine is not None and tokens.prompts is not None, "its prompts are followed"
        try:
            asked = tokens.engine.read("chat", body)
            theirs, _ = await self._words(member, tokens, shapes, "chat", body)
        except (Broken, ApiError):
            return
        if theirs is None or member.server.process != process or dates.quarter(time.time()) != quarter:
            return
        text = asked.texts[0]
        ours = text if isinstance(text, list) else tokens.prompts.tokenizer.encode(text, add_special_tokens=False)
        self._shows(shapes, member.server, quarter, difference(member.name, ours, theirs, self._text_of(tokens)))

    def _shows(self, shapes: Shapes, server: Server, quarter: int, found: Difference | None) -> None:
        if found is not None:
            log.warning("%s; prompts with a date are matched approximately", found)
        shapes.dates[server.process] = (quarter, found)

    async def _words(
        self, member: Member, tokens: Tokens, shapes: Shapes, api: str, body: bytes, told: bytes | None = None
    ) -> tuple[list[int] | None, str | None]:
        """The engine's own tokens for the request, and the field that it did not look at; `told`: known already."""
        if told is not None:
            return unpack_ids(told), "the replica, which may be another one"
        assert tokens.engine is not None, "it has shapes"
        question = tokens.engine.tokenized(api, body)
        if question is None:
            return None, None
        answer = await self._ask(member.server, "/tokenize", question.body, ANSWER_S)
        if answer.status == 200:
            return token_ids_in(answer.body), question.unseen
        if answer.status in OFF:  # else it refuses the request itself, or is busy
            why = f"POST /tokenize answers {answer.status}, so no prompt can be verified"
            if shapes.silent is None:
                log.warning("%s: %s", member.name, why)
            shapes.unanswered(why, self._now_s())
        return None, None

    def _differs(self, shapes: Shapes, name: str, process: str, odd: Odd, found: Difference) -> None:
        shapes.differed(name, process, odd, found, self._now_s())
        which = f" that have {', '.join(sorted(oddities))}" if (oddities := odd()) else ""
        log.warning("%s; prompts of this shape%s are matched approximately: %r", found, which, name)

    def _text_of(self, tokens: Tokens) -> Callable[[list[int]], str]:
        def text_of(ids: list[int]) -> str:
            if not self._shows_prompts or tokens.prompts is None:
                return ""
            try:
                return tokens.prompts.tokenizer.decode(ids, skip_special_tokens=False)
            except (ValueError, OverflowError, IndexError):  # ids beyond our vocabulary
                return ""

        return text_of

    # ---- the blocks that the engine stores

    def _stored(self, member: Member, prompt: Prompt, packed: bytes) -> int:
        """The leading blocks of these tokens that the replica's events have named."""
        size = member.block_size
        if size == APPROXIMATE:
            return 0
        root = root_key(prompt.model, prompt.lora, prompt.salt, size)
        extras = extras_of(prompt.pictures, size)
        ahead = partial(extend_keys, root, packed, size, extras)
        matches = self._placement.index.match(block_keys(packed, size, root, extras), 1 << member.slot, ahead=ahead)
        return matches.sure.get(member.slot, 0)
