"""The part of a generated answer that the client has, and how a replica begins or continues it.

For a stream from our own replicas only token ids are kept; a foreign engine's stream is parsed on its way
(`continuation`). Nothing is sent here.
"""

import random
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from api.generation_apis import GenerationApi
from api.native import KvSource, Native, envelope, pack_ids, unpack_ids
from router.members.members import Member
from router.placement.cost import Neighbour
from router.prompts.prompt import Prompt, salted_for
from router.prompts.tokens import Tokens
from router.proxy.attempt import Attempt
from router.proxy.resumable_request import why_alone, with_ids
from router.proxy.resume import COMPLETIONS_PATH, Continuation


class ResumableResponse(Struct, eq=False):
    """The response to one request. For each replica: `begin` or `can_go_on`, its body; if lost `keep`, `settle`."""

    _api: GenerationApi
    _prompt: Prompt
    _body: bytes  # the client's own
    _tokens: Tokens
    _may_resume: bool
    continuation: Continuation | None = None  # of a stream that is parsed on its way
    # The same before and after resuming:
    _response_id: str = ""
    _created: int = 0
    _seed: int | None = None
    _said: dict[int, list[bytes]] = {}  # token ids by choice, packed
    _why_alone: str = ""  # why no other replica could continue it, where that is known from the start

    # ---- the choice of a replica

    def begin(self, member: Member) -> None:
        """Prepare for a replica that begins the answer; parse its stream if another replica could continue it."""
        reads = self._may_resume and self._prompt.peek.stream and member.spec.resume and self._says_ids(member)
        self.continuation = self._new_continuation() if reads else None

    def is_unsaid(self, sent_bytes: int) -> bool:
        """Return whether the client has only the head of the answer, so that any replica can begin it again."""
        return not sent_bytes and self.continuation is None

    def can_go_on(self, member: Member, has_bytes: bool) -> bool:
        """Return whether the replica can continue the client's part of the answer; `has_bytes`: not only its head."""
        if self.continuation is None:
            if member.profile.takes_envelope:
                return True
            self.continuation = self._continuation_of_ours(has_bytes)
        return self.continuation is not None and self.continuation.fits(member.profile, member.spec.max_model_len)

    def may_move(self, attempt: Attempt, member: Member) -> bool:
        """Return whether, as far as is known now, this replica could continue the client's part of the answer."""
        if not self._may_resume:
            return False
        profile = member.profile
        if self.continuation is not None:
            return self.continuation.why_not is None and (profile.takes_envelope or profile.takes_token_ids)
        return attempt.framed and profile.takes_envelope

    def _says_ids(self, member: Member) -> bool:
        return self._api.name in member.profile.tells_ids

    def _new_continuation(self) -> Continuation | None:
        prompts, prompt = self._tokens.prompts, self._prompt
        if not self._api.is_inner:
            why: str | None = f"only replicas of warmroute continue an answer of {self._api.path}"
        elif prompts is None:
            why = "its model has no tokenizer here"
        elif prompt.read_apart:
            why = "its body is too large to be sent on in another form"
        else:
            why = why_alone(prompt, self._body)
        if prompts is None or why is not None:
            self._why_alone = why or ""
            return None
        return Continuation(self._api.is_chat, self._prompt, self._body, prompts.tokenizer)

    def _continuation_of_ours(self, has_bytes: bool) -> Continuation | None:
        """The continuation of a stream that a native replica began, if there can be one."""
        continuation = self._new_continuation()
        if continuation is not None and has_bytes:
            continuation.begun_by_ours(self._head)
            continuation.settle(unpack_ids(b"".join(self._said.get(0, ()))))
        return continuation

    @property
    def response_id(self) -> str:
        """The answer's id; empty until a replica of ours was asked."""
        return self._response_id

    @property
    def _head(self) -> tuple[str, int, str]:
        return self._response_id, self._created, self._prompt.peek.model

    # ---- what a replica is sent

    def foreign_body(self, member: Member) -> tuple[bytes, bytes | None]:
        """The body for a foreign replica, and its path if that differs: the client's, or one to continue the answer."""
        body = salted_for(self._prompt, self._body)
        continuation = self.continuation
        if continuation is None:
            return body, None
        if continuation.ids:
            return continuation.resume(body, member.spec.max_model_len), COMPLETIONS_PATH
        continuation.relay()
        return with_ids(body) if self._says_ids(member) else body, None

    def envelope(self, priority: float, neighbours: Sequence[Neighbour], new_id: Callable[[], str]) -> bytes:
        """The bytes before the body for a replica of ours: the token ids of the prompt, and of the answer so far.

        `neighbours`: that it may read the prompt's KV from. `new_id` draws the id of an answer that has none.
        """
        prompt = self._prompt
        if not self._response_id:
            self._response_id = new_id()
            self._created = int(time.time())
            if prompt.peek.seed is None:
                self._seed = random.getrandbits(63)
        native = Native(
            prompts=prompt.packed,
            resume_token_ids=self._resumed(),
            response_id=self._response_id,
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

    def _resumed(self) -> list[bytes]:
        if self.continuation is not None:
            self.continuation.relay_native()
            return [pack_ids(self.continuation.ids)] if self.continuation.ids else []
        if not self._said:
            return []
        choices = max(self._prompt.choices, max(self._said) + 1)
        return [b"".join(self._said.get(choice, ())) for choice in range(choices)]

    # ---- what comes of it

    def read(self, body: bytes, complete: bool) -> tuple[bytes, str | None]:
        """Parse a part of the stream; return the bytes for the client, and the reason if the replica is lost."""
        continuation = self.continuation
        assert continuation is not None, "others go on unread"
        shown = continuation.feed(body)
        lost = continuation.broken
        if lost is None and complete and not (continuation.done or continuation.why_not):
            lost = "its stream ended before it was complete"
        if lost is None and complete:
            shown += continuation.rest()
        return shown, lost

    def keep(self, attempt: Attempt) -> None:
        """Add the tokens of a lost replica to the answer."""
        for choice, packed in attempt.token_ids.items():
            self._said.setdefault(choice, []).extend(packed)

    def settle(self, attempt: Attempt, has_bytes: bool) -> str | None:
        """Determine the client's part of the answer; return the reason if no replica can continue it."""
        if self.is_unsaid(has_bytes):
            return None
        if not self._may_resume:
            return "resuming is switched off"
        continuation = self.continuation
        if continuation is None:
            # A replica that was lost before its head has added nothing.
            return None if attempt.framed or not attempt.status else self._why_alone or "its token ids are not known"
        if continuation.head is not None:
            self._response_id, self._created, _ = continuation.head
        elif attempt.framed and has_bytes:
            continuation.begun_by_ours(self._head)
        continuation.settle(unpack_ids(b"".join(attempt.token_ids.get(0, ()))) if attempt.framed else None)
        return continuation.why_not

    def ending(self, member: Member) -> bytes | None:
        """The missing end of a stream if all its tokens were generated, so that no other replica is needed."""
        continuation = self.continuation
        if continuation is None or continuation.head is None or not continuation.is_complete(member.spec.max_model_len):
            return None
        return continuation.ending()
