"""The answer in progress: what the client has of it, and how a replica begins, continues or repeats it.

A generation goes on by token ids: of a stream from our own replicas only those are kept; a foreign engine's stream is
parsed on its way (`resume`). Of the Messages and Responses APIs of foreign engines, another replica repeats the stream
(`repetition`). A whole answer is kept until it is complete. Nothing is sent here.
"""

import random
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from api.errors import ApiError
from api.generation_apis import GenerationApi
from api.native import KvSource, Native, envelope, pack_ids, unpack_ids
from router.members.budget import Budget
from router.members.members import Member
from router.placement.cost import Neighbour
from router.prompts.prompt import Prompt, salted_for
from router.prompts.tokens import Tokens
from router.proxy.attempt import Attempt
from router.proxy.events import aborted_event, mark_of, with_lf
from router.proxy.prefill import Beginning
from router.proxy.repetition import Repetition
from router.proxy.resume import COMPLETIONS_PATH, Continuation, why_alone, with_ids

MAX_KEPT_BYTES = 4 * 1024 * 1024
LONGEST_END = 64  # more than the beginning of any last event has
HAS_BEGUN = "its answer has begun"


class Answer(Struct, eq=False):
    """The answer to one request. For each replica: `goes_to`, then its body; if it is lost `keep` and `settle`."""

    api: GenerationApi | None  # of its events; None: no event can end a stream
    prompt: Prompt | None  # None: it is not continued by token ids, but repeated
    body: bytes  # the client's own
    tokens: Tokens | None  # of its model, if that is known
    streams: bool = False
    may_resume: bool = False
    may_repeat: bool = True
    reader: Continuation | Repetition | None = None  # of a stream that is parsed on its way
    events: "SentEvents | None" = None  # for a client that reads events, so that its stream can end with an error
    beginning: Beginning | None = None  # that may turn out to be an error
    kept: "KeptAnswer | None" = None  # of a whole answer, which another replica can repeat
    # The same before and after resuming:
    response_id: str = ""  # empty until a replica of ours was asked
    _created: int = 0
    _seed: int | None = None
    _said: dict[int, list[bytes]] = {}  # token ids by choice, packed
    _why_alone: str = ""  # why no other replica could continue it, where that is known from the start

    # ---- the choice of a replica

    def goes_to(self, member: Member, *, has_begun: bool, has_bytes: bool) -> bool:
        """Prepare for a replica; return whether it can go on with what the client has."""
        self.beginning = None
        reader, prompt = self.reader, self.prompt
        if prompt is None:
            if isinstance(reader, Repetition) and has_bytes:
                reader.begin()
            else:
                reads = self.may_resume and member.spec.resume and self.api is not None and self.streams
                self.reader = Repetition(self.api.name, self.ends) if reads and self.api is not None else None
            return True
        if not has_begun or (reader is None and not has_bytes):
            reads = self.may_resume and self.streams and member.spec.resume and self._says_ids(member)
            self.reader = self._new_continuation(prompt) if reads else None
            return True
        if reader is None:
            if member.profile.takes_envelope:
                return True
            # A native replica began the stream.
            self.reader = reader = self._new_continuation(prompt)
            if reader is not None and has_bytes:
                reader.begun_by_ours(self._head(prompt))
                reader.settle(unpack_ids(b"".join(self._said.get(0, ()))))
        return isinstance(reader, Continuation) and reader.fits(member.profile, member.spec.max_model_len)

    def may_move(self, attempt: Attempt, member: Member, *, has_bytes: bool) -> bool:
        """Return whether, as far as is known now, this replica could go on with what the client has."""
        if self.prompt is None:
            return self._why_not_repeated(has_bytes) is None
        reader, profile = self.reader, member.profile
        if self.events is None or not self.may_resume:
            return False
        if reader is not None:
            return reader.why_not is None and (profile.takes_envelope or profile.takes_token_ids)
        return attempt.framed and profile.takes_envelope

    def _says_ids(self, member: Member) -> bool:
        return self.api is not None and self.api.name in member.profile.tells_ids

    def _new_continuation(self, prompt: Prompt) -> Continuation | None:
        prompts, api = None if self.tokens is None else self.tokens.prompts, self.api
        assert api is not None, "it is a generation"
        if not api.is_inner:
            why: str | None = f"only replicas of warmroute continue an answer of {api.path}"
        elif prompts is None:
            why = "its model has no tokenizer here"
        elif prompt.read_apart:
            why = "its body is too large to be sent on in another form"
        else:
            why = why_alone(prompt, self.body)
        if prompts is None or why is not None:
            self._why_alone = why or ""
            return None
        return Continuation(api.is_chat, prompt, self.body, prompts.tokenizer)

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer of the model; empty: they are not known."""
        prompts = None if self.tokens is None else self.tokens.prompts
        if prompts is None:
            return frozenset()
        return prompts.tokenizer.special_token_ids.union(prompts.tokenizer.eos_token_ids)

    def _head(self, prompt: Prompt) -> tuple[str, int, str]:
        return self.response_id, self._created, prompt.peek.model

    # ---- what a replica is sent

    def foreign_body(self, prompt: Prompt, member: Member) -> tuple[bytes, bytes | None]:
        """The body for a foreign replica, and its path if that differs: the client's, or one to continue the answer."""
        body = salted_for(prompt, self.body)
        reader = self.reader
        if not isinstance(reader, Continuation):
            return body, None
        if reader.ids:
            return reader.resume(body, member.spec.max_model_len), COMPLETIONS_PATH
        reader.relay()
        return with_ids(body) if self._says_ids(member) else body, None

    def envelope(
        self, prompt: Prompt, priority: float, neighbours: Sequence[Neighbour], new_id: Callable[[], str]
    ) -> bytes:
        """The bytes before the body for a replica of ours: the token ids of the prompt, and of the answer so far.

        `neighbours`: that it may read the prompt's KV from. `new_id` draws the id of an answer that has none.
        """
        if not self.response_id:
            self.response_id = new_id()
            self._created = int(time.time())
            if prompt.peek.seed is None:
                self._seed = random.getrandbits(63)
        resumed: list[bytes] = []
        if isinstance(self.reader, Continuation):
            self.reader.relay_native()
            resumed = [pack_ids(self.reader.ids)] if self.reader.ids else []
        elif self._said:
            choices = max(prompt.choices, max(self._said) + 1)
            resumed = [b"".join(self._said.get(choice, ())) for choice in range(choices)]
        native = Native(
            prompts=prompt.packed,
            resume_token_ids=resumed,
            response_id=self.response_id,
            created=self._created,
            seed=self._seed,
            priority=priority,
            cache_salt=prompt.salt,
            retain=prompt.retain,
            tells_use=len(prompt.packed) != 1 or prompt.choices > 1,
        )
        if len(prompt.packed) == 1:
            native.kv_sources = [KvSource(one.endpoint, one.tokens) for one in neighbours]
        return envelope(native)

    # ---- what comes of it

    def keep(self, budget: Budget, body: bytes) -> bool:
        """Keep a part of a whole answer; return False if it is too long, or there is no room."""
        if self.kept is None:
            self.kept = KeptAnswer(budget)
        return self.kept.keep(body)

    def take_kept(self) -> bytes:
        """Return what was kept, and release its memory."""
        return b"" if self.kept is None else self.kept.take()

    def lost(self, attempt: Attempt) -> None:
        """Drop what another replica repeats, and add the tokens of the lost one to the answer."""
        self.take_kept()
        for choice, packed in attempt.token_ids.items():
            self._said.setdefault(choice, []).extend(packed)

    def settle(self, attempt: Attempt, *, has_bytes: bool) -> str | None:
        """Determine the client's part of the answer; return the reason if no replica can go on with it."""
        reader, prompt = self.reader, self.prompt
        if prompt is None:
            return self._why_not_repeated(has_bytes)
        why_not = None
        if has_bytes or reader is not None:
            if not self.may_resume:
                why_not = "resuming is switched off"
            elif not isinstance(reader, Continuation):
                # A replica that was lost before its head has added nothing.
                if not attempt.framed and attempt.status:
                    why_not = self._why_alone or "its token ids are not known"
            else:
                if reader.head is not None:
                    self.response_id, self._created, _ = reader.head
                elif attempt.framed and has_bytes:
                    reader.begun_by_ours(self._head(prompt))
                reader.settle(unpack_ids(b"".join(attempt.token_ids.get(0, ()))) if attempt.framed else None)
                why_not = reader.why_not
        return why_not or ("the client has a part of a whole answer already" if self.events is None else None)

    def _why_not_repeated(self, has_bytes: bool) -> str | None:
        if not self.may_repeat:
            return HAS_BEGUN
        if not has_bytes:
            return HAS_BEGUN if self.events is None else None
        return "the client has a part of it" if self.reader is None else self.reader.why_not

    def ending(self, member: Member) -> bytes | None:
        """The missing end of a stream if all its tokens were generated, so that no other replica is needed."""
        reader, length = self.reader, member.spec.max_model_len
        if not isinstance(reader, Continuation) or reader.head is None or not reader.is_complete(length):
            return None
        return reader.ending()


class KeptAnswer:
    """The beginning of an unstreamed answer, kept so that another replica can repeat it, within the router's budget."""

    __slots__ = ("_budget", "_bytes", "_held_bytes")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bytes: bytearray | None = None
        self._held_bytes = 0  # of the budget: these, and an unfinished frame

    def keep(self, body: bytes) -> bool:
        """Add a part; return False and add nothing if it is too long, or there is no room."""
        if self._bytes is None:
            self._bytes = bytearray()
        if len(self._bytes) + len(body) > MAX_KEPT_BYTES or not self._hold(self._held_bytes + len(body)):
            return False
        self._bytes += body
        return True

    def take(self) -> bytes:
        """Return what was kept, and release its memory."""
        if not self._held_bytes:
            return b""
        kept, self._bytes = bytes(self._bytes or b""), None
        self._hold(0)
        return kept

    def hold_beside(self, pending_bytes: int) -> bool:
        """Claim memory for an unfinished frame; return False if there is no room."""
        return self._hold(pending_bytes + len(self._bytes or b""))

    def _hold(self, wanted_bytes: int) -> bool:
        more = wanted_bytes - self._held_bytes
        if more > 0 and not self._budget.take(more):
            return False
        if more < 0:
            self._budget.give_back(-more)
        self._held_bytes = wanted_bytes
        return True


class SentEvents:
    """The end of a client's stream of events, to see if it is complete and to end it with an error otherwise."""

    __slots__ = ("_api", "_count", "_end", "is_between", "mark")

    def __init__(self, api: GenerationApi) -> None:
        self._api = api
        self.mark = mark_of(api.name)  # only events with it may give the answer up
        self._count = 0  # where they are numbered
        self._end = b""
        self.is_between = True  # no event has begun

    def note(self, body: bytes) -> None:
        self._end = body if len(body) >= LONGEST_END else (self._end + body)[-LONGEST_END:]
        self.is_between = self._end.endswith(b"\n\n")
        if self._api.ending is not None:
            self._count += body.count(b"\n\n")  # frames of ours have whole events

    def before_abort(self, body: bytes) -> bytes | None:
        """The whole events before the one with which the engine gives the answer up; None: it does not, in `body`."""
        return aborted_event(self._api.name, self._end[-LONGEST_END:], body)

    @property
    def is_complete(self) -> bool:
        api, end = self._api, with_lf(self._end)
        return end.endswith(api.last_event) if api.ending is None else bool(api.ending.search(end))

    def error_event(self, error: ApiError) -> bytes:
        """The bytes that end the stream with an error, after half an event, too."""
        end_of_half_an_event = b"" if with_lf(self._end).endswith(b"\n\n") or not self._end else b"\n\n"
        return end_of_half_an_event + self._api.error_event(error, self._count)
