"""Asks replicas for the tokens of prompts that the router cannot make itself, before they are placed.

A conversation's first prompt is asked for as a whole. Of a later one only the new messages are, behind a greeting: the
tokens that follow the greeting's also follow the prompt before. In which kinds of conversations that is so is learned
by comparing, and compared again now and then. Of a picture its tokens and its name are asked for, once; all else is
asked with a small one in its place (`router.prompts.pictures`).

Clients cause these questions, so they are bounded: so many at once at each replica, of bodies up to a size, each waited
for so long. Whoever gets no answer is placed by text. What is remembered of one salt is used for no other.
"""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Raw, Struct

from api.http.prometheus import FIRST_TOKEN_S, Histogram
from api.process.tasks import end
from api.retention import common_packed
from engines.prompts import dates
from events.blocks import TOKEN_BYTES
from router.members.broken import Broken
from router.members.fetch import Fetched, TooLong
from router.members.members import Member, ServedModel, Server
from router.members.verification import GREETING, MAX_BODY_BYTES, OFF
from router.prompts.pictures import ITEMS, MEDIA, STAND_INS, cut, digest, placed
from router.prompts.prompt import UNREADABLE, Prompt
from router.prompts.shapes import DIFFERS
from router.prompts.tokenizer_probe import told_in
from router.prompts.tokens import Tokens

log = logging.getLogger(__name__)

WAIT_S = 0.1  # a request waits this long for its tokens
ANSWER_S = 2.0  # an answer that comes later than that is of use for the next turn
PICTURE_S = 10.0  # the same of a picture, which the engine has to prepare
MAX_AT_ONCE, MAX_PICTURES_AT_ONCE = 4, 3  # prompts that one replica is asked for, and pictures in their place
LATE, PICTURE = "late", "picture"
BUSY_S = 0.25  # a replica that was late is not asked for this long: its requests come first
AGAIN_S = 60.0  # the same of a route that it does not have, and of pictures if it did not tell one
MEMORY_BYTES = 64 * 1024 * 1024
AGREEMENTS = 3  # after so many in a row only new messages of such conversations are asked about
COMPARE_EVERY = 16  # then one in so many is compared with the whole
REFUTED_S = 3600.0
MAX_KINDS = 512
MAX_END = 32  # tokens at a prompt's end that its next turn has not: they ask for the answer
WHY_NOT = {
    "large": "its body is too large to ask its engine for its tokens",
    "media": "it has media that are not sent in it, or are no pictures, or very many",
    "differs": "the tokens that its engine told differed from those that it computed",
    "mixed": "replicas of ours would compute tokens that were told, right or wrong",
    "busy": "no replica was free to tell its tokens",
    "late": f"no replica told its tokens within {WAIT_S:g} s",
    "refused": "its engine does not tell its tokens",
}
HEADS = frozenset(("tools", "tool_choice", "system", "instructions"))  # fields that a prompt begins with
# Fields that change no token of a prompt; all others are told to the engine, and compared.
OF_ANSWERS = frozenset(
    (
        *("stream", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_sequences", "presence_penalty", "user"),
        *("frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "ignore_eos", "return_token_ids"),
        *("cache_salt", "prompt_cache_key", "metadata", "store", "service_tier", "safety_identifier"),
    )
)
OF_PICTURES = frozenset(("model", "mm_processor_kwargs", "media_io_kwargs"))  # fields that may change their tokens
THOUGHTS = re.compile(rb'"(?:reasoning|thinking|redacted)|think>|THINK\]')  # templates leave out old ones

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Raw]]).decode


class Conversation(Struct):
    """A request without what changes no token, and the keys by which prompts of its first items are remembered."""

    api: str
    fields: dict[str, Raw]
    items: list[dict[str, Raw]]
    keys: list[bytes]
    thinks: bool
    owner: bytes  # before the digest of a picture, its key

    @classmethod
    def read(cls, api: str, body: bytes, salt: str | None) -> "Conversation":
        """Read a body; raise one of UNREADABLE if it cannot be."""
        fields = {name: value for name, value in _decode_fields(body).items() if name not in OF_ANSWERS}
        given = fields.get(ITEMS.get(api, ""), Raw(b""))
        items = _decode_items(fields.pop(ITEMS[api])) if bytes(given).startswith(b"[") else []
        keys = [key_of([api, salt, fields])]
        owner = key_of([api, salt, {name: fields[name] for name in OF_PICTURES & fields.keys()}])
        for item in items:
            keys.append(key_of(item, keys[-1]))
        return cls(api, fields, items, keys, THOUGHTS.search(body) is not None, owner)

    def body(self, items: Sequence[Mapping[str, Any]], without: Set[str] = frozenset()) -> bytes:
        fields: dict[str, Any] = {name: value for name, value in self.fields.items() if name not in without}
        if self.api == "messages":
            fields["max_tokens"] = 1  # such a request has to have it
        return msgspec.json.encode({**fields, ITEMS[self.api]: items} if self.items else fields)

    def kind(self, begun: int) -> bytes:
        """Name all that may decide how the items from this place on follow the others."""
        small = STAND_INS[self.api]
        shown = [[*sorted(one), one.get("role"), bytes(one.get("content", b"")).count(small)] for one in self.items]
        more = shown[begun - 1 :], any(one[-1] for one in shown[:begun])
        return key_of([self.api, self.fields.get("model"), sorted(self.fields), self.thinks, *more])


def key_of(value: Any, before: bytes = b"") -> bytes:
    return blake2b(before + msgspec.json.encode(value, order="deterministic"), digest_size=16).digest()


def gone_on(before: bytes, greeting: bytes, longer: bytes) -> bytes:
    """The prompt that goes on after another one as a longer one does after a greeting; empty if none does."""
    common = common_packed(greeting, longer) * TOKEN_BYTES
    ending = greeting[common:]
    if len(ending) > MAX_END * TOKEN_BYTES or not before.endswith(ending):
        return b""
    return before[: len(before) - len(ending)] + longer[common:]


class Kind(Struct):
    """Conversations of a kind: whether new messages follow the old ones as they follow a greeting."""

    agreed: int = 0  # comparisons in a row
    uses: int = 0
    refuted_until_s: float = 0.0


@dataclass(eq=False)
class Asking:
    """Tells prompts their tokens. `_ask` is a POST to a replica on the router's own behalf; it raises Broken."""

    _ask: Callable[[Server, str, bytes, float], Awaitable[Fetched]]
    _now_s: Callable[[], float]
    outcomes: Counter[str] = field(default_factory=Counter)
    questions: Counter[str] = field(default_factory=Counter)  # by what they are about
    seconds: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    _memory: dict[bytes, list[bytes]] = field(default_factory=dict)  # prompts, the last used at the end
    _memory_bytes: int = 0
    _quarter: int | None = None  # of an hour, in which no date changes
    _kinds: dict[bytes, Kind] = field(default_factory=dict)
    _under_way: dict[bytes, asyncio.Task[list[bytes]]] = field(default_factory=dict)
    _at: Counter[str] = field(default_factory=Counter)  # questions under way, by server
    _rests_until_s: dict[tuple[str, str], float] = field(default_factory=dict)  # by process and reason

    def wants(self, tokens: Tokens, prompt: Prompt) -> bool:
        """Tell whether an engine is to be asked for this prompt, which is not exact."""
        if tokens.question is None or prompt.asked or prompt.exact:
            return False
        return prompt.why_not == DIFFERS or prompt.reason != "shape"

    async def tell(self, model: ServedModel, prompt: Prompt, api: str, body: bytes) -> None:
        """Give the prompt the tokens that its engine makes of it, or a reason why it has none."""
        prompt.asked = True
        told = await self.told(model, prompt, api, body)
        self.outcomes["told" if isinstance(told, list) else told] += 1
        if isinstance(told, str):
            prompt.why_not = f"{prompt.why_not}; {WHY_NOT[told]}"
            return
        prompt.packed, prompt.exact, prompt.why_not, prompt.reason, prompt.unverified = told, True, None, None, None
        prompt.tokens, prompt.all_tokens = len(told[0]) // TOKEN_BYTES, sum(map(len, told)) // TOKEN_BYTES
        prompt.dated_s = None

    async def close(self) -> None:
        await end(self._under_way.values())

    async def told(self, model: ServedModel, prompt: Prompt, api: str, body: bytes) -> list[bytes] | str:
        """The token ids of each of its prompts, or the reason why they are not known."""
        tokens, shapes, now_s = model.tokens, model.tokens.shapes, self._now_s()
        assert shapes is not None, "its engine tells tokens"
        try:
            shown = prompt.cut if prompt.read_apart else cut(api, body)
            if shown is None:
                return "large" if prompt.read_apart or len(body) > MAX_BODY_BYTES else "media"
            asked = Conversation.read(api, shown.body, prompt.salt)
        except UNREADABLE:
            return "refused"
        if any(one.profile.takes_envelope for one in model.members):
            return "mixed"
        able = [one for one in model.members if one.profile.question and one.candidate.unavailable is None]
        odd = partial(tokens.odd, prompt)

        def may_ask(shape: str) -> bool:
            return any(shapes.may_ask(shape, one.server.process, odd, now_s) for one in able)

        if prompt.shape is not None and may_ask(prompt.shape):
            return "differs"  # until it is compared again, beside the traffic
        # The engine has to store the blocks of such tokens before they are called exact.
        shape, key = f"{api} as told: {' '.join(sorted(asked.fields))[:200]}", asked.keys[-1]
        if shown.pictures:  # the tokens of each may depend on the others
            shape += f"; {len(shown.pictures)} pictures"
        if shapes.why_not(shape, odd) == DIFFERS:
            if not may_ask(shape):
                return "differs"
            self._forget()

        async def learn_picture(member: Member, named: bytes, start: int, stop: int) -> list[bytes]:
            part, others = body[start:stop], asked.fields.keys() - OF_PICTURES
            items = [{"role": "user", "content": [Raw(part)]}]
            about = await asyncio.to_thread(lambda: digest(part) == named and asked.body(items, others))
            told = await self._answer(member, PICTURE, api, about) if about else []  # else a salt has moved it
            self._remember(asked.owner + named, told)
            return told

        learn = {key: partial(self._learn, asked=asked)}
        for named, start, stop in shown.pictures:
            learn[asked.owner + named] = partial(learn_picture, named=named, start=start, stop=stop)
        known = await self.known(able, learn)
        if isinstance(known, str):
            return known
        told, prompt.pictures = placed(known[key], [known[asked.owner + named] for named, _, _ in shown.pictures])
        if told:
            prompt.shape = shape
        return told or "refused"

    async def known(
        self, able: Sequence[Member], learn: Mapping[bytes, Callable[[Member], Coroutine[Any, Any, list[bytes]]]]
    ) -> dict[bytes, list[bytes]] | str:
        """Tell what is known by these keys, or why some of it is not; the first is the prompt's own."""
        known, tasks, at = dict[bytes, list[bytes]](), dict[bytes, asyncio.Task[list[bytes]]](), self._at
        asks, most, why, is_busy = None, MAX_AT_ONCE, LATE, False
        for key, ask in learn.items():
            if (told := self._recalled(key)) is not None:
                known[key] = told
            elif (task := self._under_way.get(key)) is not None:
                tasks[key] = task
            else:
                free = [one for one in able if at[one.server.name] < most and not self._rests(one, why)]
                if free:
                    member = min(free, key=lambda one: (at[one.server.name], one.candidate.all_in_flight))
                    tasks[key] = self._begin(member, key, ask(member))
                    asks = member if why is LATE else None  # pictures make a text's answer late
                is_busy = is_busy or not free
            most, why = MAX_PICTURES_AT_ONCE, PICTURE
        if is_busy:
            return "busy"
        late = (await asyncio.wait(tasks.values(), timeout=WAIT_S))[1] if tasks else ()
        if late:
            if asks is not None and tasks[next(iter(learn))] in late:
                self._let_rest(asks, LATE, BUSY_S)
            return "late"
        return known | {key: task.result() for key, task in tasks.items()}

    def _begin(self, member: Member, key: bytes, work: Coroutine[Any, Any, list[bytes]]) -> "asyncio.Task[list[bytes]]":
        def is_over(_: object) -> None:
            self._under_way.pop(key, None)
            self._at[member.server.name] -= 1

        task = self._under_way[key] = asyncio.get_running_loop().create_task(work)
        self._at[member.server.name] += 1
        task.add_done_callback(is_over)
        return task

    # ---- questions

    def _rests(self, member: Member, why: str) -> bool:
        return self._rests_until_s.get((member.server.process, why), 0.0) > self._now_s()

    def _let_rest(self, member: Member, why: str, for_s: float) -> None:
        if len(self._rests_until_s) > MAX_KINDS:
            self._rests_until_s.clear()
        self._rests_until_s[member.server.process, why] = self._now_s() + for_s

    async def _answer(self, member: Member, about: str, api: str, body: bytes) -> list[bytes]:
        """The engine's tokens of a request's prompts, or a picture's and its name; none if it does not tell them."""
        server, began_s, is_picture = member.server, self._now_s(), about == PICTURE
        for renders in (True,) if is_picture or MEDIA.search(body) else (True, False):  # others tell no names
            if self._rests(member, str(renders)):
                continue
            question = None if member.profile.question is None else member.profile.question(api, body, renders)
            if question is None or question.unseen is not None:
                continue
            self.questions[about] += 1
            try:
                answer = await self._ask(server, question.path, question.body, PICTURE_S if is_picture else ANSWER_S)
            except Broken as error:
                has_pixels = isinstance(error, TooLong)  # it is an older version
                self._let_rest(member, PICTURE if is_picture else LATE, AGAIN_S if has_pixels else BUSY_S)
                return []
            finally:
                self.seconds.observe(self._now_s() - began_s)
            if answer.status == 200:
                told = told_in(answer.body)
                if is_picture:
                    return told[0][1][0] if told and len(told[0][1]) == 1 else []
                return [packed for packed, _ in told]
            if answer.status not in OFF or (answer.status == 404 and b"model" in answer.body):
                return []  # it refuses the request itself, as one for an adapter that it does not have
            self._let_rest(member, str(renders), AGAIN_S)
        return []

    # ---- what is known

    def _recalled(self, key: bytes) -> list[bytes] | None:
        if (quarter := dates.quarter(time.time())) != self._quarter or quarter is None:
            self._memory.clear()  # its prompts may show the date
            self._memory_bytes, self._quarter = 0, quarter
        known = self._memory.pop(key, None)
        if known is not None:
            self._memory[key] = known
        return known

    def _forget(self) -> None:
        self._memory.clear()
        self._kinds.clear()
        self._memory_bytes = 0

    def _remember(self, key: bytes, told: list[bytes]) -> None:
        if told and self._recalled(key) is None:
            self._memory[key] = told
            self._memory_bytes += sum(map(len, told))
        while self._memory_bytes > MEMORY_BYTES:
            self._memory_bytes -= sum(map(len, self._memory.pop(next(iter(self._memory)))))

    async def _learn(self, member: Member, asked: Conversation) -> list[bytes]:
        """Ask for a prompt: for what follows an earlier one, if that is known to be enough, or for all of it."""
        key, whole = asked.keys[-1], partial(self._answer, member, "whole", asked.api, asked.body(asked.items))
        for begun in range(len(asked.items) - 1, 0, -1):
            if (before := self._recalled(asked.keys[begun])) is not None:
                break
        else:
            told = await whole()
            self._remember(key, told)
            return told

        async def compare() -> list[bytes]:
            others = await other()
            if others == told:
                kind.agreed += 1
            elif others:
                if kind.agreed >= AGREEMENTS:
                    log.warning("an engine's tokens of a conversation are others than those of its new messages")
                    self._forget()
                kind.agreed, kind.refuted_until_s = 0, self._now_s() + REFUTED_S
            return others

        follow, name = partial(self._follow, member, asked, begun, before[0]), asked.kind(begun)
        kind = self._kinds[name] = self._kinds.pop(name) if name in self._kinds else Kind()
        if len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        kind.uses += 1
        if kind.agreed >= AGREEMENTS:
            told, other = await follow(), whole
            compares = kind.uses % COMPARE_EVERY == 0
            if not any(told):  # the new messages do not follow so, or it does not say
                kind.agreed, told, compares = 0, await whole(), False
        else:
            told, other, compares = await whole(), follow, kind.refuted_until_s <= self._now_s()
        self._remember(key, told)
        if told and compares:
            self._begin(member, key + b"compared", compare())
        return told

    async def _follow(self, member: Member, asked: Conversation, begun: int, before: bytes) -> list[bytes]:
        """The prompt by its new items alone; none if the engine tells nothing, an empty one if that cannot be."""
        key = key_of([asked.api, *(field for field in asked.fields.items() if field[0] not in HEADS)])
        greeting = self._recalled(key)
        if greeting is None:
            greeting = await self._answer(member, "greeting", asked.api, asked.body([GREETING], HEADS))
            self._remember(key, greeting)
        longer = await self._answer(member, "new", asked.api, asked.body([GREETING, *asked.items[begun:]], HEADS))
        return [gone_on(before, greeting[0], longer[0])] if greeting and longer else []
