"""The progress of an answer: what the client has of it, and how another replica goes on: by token ids, anew, or not."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from api.generation_apis import APIS, RESPONSES
from api.native import KvSource, Native, envelope, pack_ids, unpack_ids
from router.members.members import Member
from router.placement.decision import Decision
from router.prompts.prompt import Prompt, salted_for
from router.proxy.attempt import Attempt
from router.proxy.facts import RequestFacts
from router.proxy.streams.continuation import COMPLETIONS_PATH, Continuation
from router.proxy.streams.fields import why_alone, with_ids
from router.proxy.streams.repetition import FIELD, Repetition


@dataclass(slots=True, eq=False)
class Progress:
    """For each replica: `goes_to`, then its body; when it is lost, `settle`."""

    facts: RequestFacts
    reader: Continuation | Repetition | None = None  # parses a stream on its way
    # The same before and after resuming:
    response_id: str = ""  # empty until a replica of ours was asked
    _created: int = 0
    _seed: int | None = None
    _said: dict[int, list[bytes]] = field(default_factory=dict)  # token ids by choice, packed
    _why_alone: str = ""  # why no other replica could continue it, where that is known from the start

    def goes_to(self, member: Member) -> bool:
        """Prepare for a replica; return whether it can go on with what the client has."""
        facts, reader, kind = self.facts, self.reader, self.facts.type
        exchange, reads = facts.exchange, facts.may_resume and facts.streams and member.spec.resume
        has_bytes = exchange.sent_bytes > 0
        if kind.generation is None:
            if isinstance(reader, Repetition) and has_bytes:
                reader.begin()
            else:
                self.reader = Repetition(kind.api, self.ends) if reads and kind.api in APIS else None
            return True
        if not exchange.response_started or (reader is None and not has_bytes):
            reads = reads and kind.api in member.profile.tells_ids
            self.reader = self._new_continuation() if reads else None
            return True
        if reader is None:
            if member.profile.takes_envelope:
                return True
            # A native replica began the stream.
            self.reader = reader = self._new_continuation()
            if reader is not None and has_bytes:
                reader.begun_by_ours(self._head)
                reader.settle(unpack_ids(b"".join(self._said.get(0, ()))))
        return isinstance(reader, Continuation) and reader.fits(member.profile, member.spec.max_model_len)

    def _new_continuation(self) -> Continuation | None:
        facts, prompt, api = self.facts, self.facts.prompt, self.facts.type.generation
        prompts = None if facts.model is None else facts.model.tokens.prompts
        assert isinstance(prompt, Prompt) and api is not None, "a generation is read"
        if not api.is_inner:
            why: str | None = f"only replicas of warmroute continue an answer of {api.path}"
        elif prompts is None:
            why = "its model has no tokenizer here"
        elif prompt.read_apart:
            why = "its body is too large to be sent on in another form"
        else:
            why = why_alone(prompt, facts.body)
        if prompts is None or why is not None:
            self._why_alone = why or ""
            return None
        return Continuation(api.is_chat, prompt, facts.body, prompts.tokenizer)

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer of the model; empty: they are not known."""
        prompts = None if self.facts.model is None else self.facts.model.tokens.prompts
        if prompts is None:
            return frozenset()
        return prompts.tokenizer.special_token_ids.union(prompts.tokenizer.eos_token_ids)

    @property
    def _head(self) -> tuple[str, int, str]:
        return self.response_id, self._created, self.facts.peek.model

    # ---- what a replica is sent

    def foreign_body(self, member: Member) -> tuple[bytes, bytes | None]:
        """The body for a foreign replica, and its path if that differs: the client's, or one to continue the answer."""
        facts, prompt, reader = self.facts, self.facts.prompt, self.reader
        assert isinstance(prompt, Prompt), "a generation is read"
        body = facts.body if prompt.salt is None else salted_for(prompt, facts.body)
        if not isinstance(reader, Continuation):
            return body, None
        if reader.ids:
            return reader.resume(body, member.spec.max_model_len), COMPLETIONS_PATH
        reader.relay()
        return with_ids(body) if facts.type.api in member.profile.tells_ids else body, None

    def envelope(self, decision: Decision, now_s: float, new_id: Callable[[], str]) -> bytes:
        """The bytes before the body for a replica of ours: the token ids of the prompt, and of the answer so far.

        `new_id` draws the id of an answer that has none.
        """
        prompt, reader = self.facts.prompt, self.reader
        assert isinstance(prompt, Prompt), "a generation is read"
        packed = [] if prompt.asked else prompt.packed  # what another engine has told is for the choice alone
        if not self.response_id:
            self.response_id = new_id()
            self._created = int(time.time())
            if prompt.peek.seed is None:
                self._seed = random.getrandbits(63)
        resumed: list[bytes] = []
        if isinstance(reader, Continuation):
            reader.relay(native=True)
            resumed = [pack_ids(reader.ids)] if reader.ids else []
        elif self._said:
            choices = max(prompt.choices, max(self._said) + 1)
            resumed = [b"".join(self._said.get(choice, ())) for choice in range(choices)]
        native = Native(
            prompts=packed,
            resume_token_ids=resumed,
            response_id=self.response_id,
            created=self._created,
            seed=self._seed,
            priority=decision.priority_s(now_s),
            cache_salt=prompt.salt,
            retain=prompt.retain,
            tells_use=len(packed) != 1 or prompt.choices > 1,
            is_cold=decision.question.is_cold,
        )
        if len(packed) == 1:
            native.kv_sources = [KvSource(one.endpoint, one.tokens) for one in decision.neighbours]
        return envelope(native)

    def asks_tokens(self, member: Member) -> bool:
        """Return whether only tokens can tell if this replica has given the answer up."""
        facts = self.facts
        is_hidden = facts.type.api == RESPONSES.name and facts.type.generation is None and member.profile.hides_aborts
        # A gateway gets answers as they are, with the tokens.
        return is_hidden and member.spec.resume and facts.may_resume and FIELD not in facts.body and bool(self.ends)

    # ---- when it is lost

    def keep(self, attempt: Attempt) -> None:
        """Keep the token ids that it has generated."""
        for choice, packed in attempt.token_ids.items():
            self._said.setdefault(choice, []).extend(packed)

    def settle(self, attempt: Attempt) -> str | None:
        """Find what the client has got of this replica; return why no other one can go on from there."""
        reader, has_bytes = self.reader, self.facts.exchange.sent_bytes > 0
        if not has_bytes and reader is None:
            return None
        if not self.facts.may_resume:
            return "resuming is switched off"
        if not isinstance(reader, Continuation):
            if attempt.framed or not attempt.status:  # one that was lost before its head has added nothing
                return None
            return self._why_alone or "its token ids are not known"
        if reader.head is not None:
            self.response_id, self._created, _ = reader.head
        elif attempt.framed and has_bytes:
            reader.begun_by_ours(self._head)
        reader.settle(unpack_ids(b"".join(attempt.token_ids.get(0, ()))) if attempt.framed else None)
        return reader.why_not

    def ending(self, attempt: Attempt) -> bytes | None:
        """The missing end of an answer of which nothing is left to generate; None: it needs another replica."""
        reader, longest = self.reader, attempt.member.spec.max_model_len
        if not isinstance(reader, Continuation) or reader.head is None or not reader.is_complete(longest):
            return None
        return reader.ending()
