"""What a client has been told so far of a generated answer, and how a replica begins it or goes on with it.

Of a stream from our own replicas only the token ids are kept; one of a foreign engine is read on its way
(`continuation`). Nothing is sent here.
"""

import random
import time

from msgspec import Struct

from api.native import Native, envelope, pack_ids, unpack_ids
from api.responses import chat_id, completion_id
from router.members.members import Member
from router.prompts.prompt import Prompt, salted
from router.prompts.tokens import Tokens
from router.proxy.attempt import Attempt
from router.proxy.resume import COMPLETIONS_PATH, TAKE_IDS, Continuation, why_alone, with_ids


class Answer(Struct, eq=False):
    """Of one request. For each replica: `begin` or `can_go_on`, then its body, and when it is lost `keep`, `settle`."""

    _chat: bool
    _prompt: Prompt
    _body: bytes  # the client's own
    _tokens: Tokens
    _may_resume: bool
    continuation: Continuation | None = None  # of a stream that is read on its way
    # What a resumed answer must have in common with the one it goes on with.
    _response_id: str = ""
    _created: int = 0
    _seed: int | None = None
    _said: dict[int, list[bytes]] = {}  # token ids by choice, packed

    # ---- who answers

    def begin(self, member: Member) -> None:
        """The client has nothing yet: anybody can. It is read on its way where another one could go on with it."""
        reads = self._may_resume and self._prompt.peek.stream and member.spec.resume and says_ids(member, self._chat)
        self.continuation = self._new_continuation() if reads else None

    def can_go_on(self, member: Member, has_bytes: bool) -> bool:
        """With what the client has begun to read; `has_bytes`: and not only its head."""
        if self.continuation is None:
            if member.native:
                return True
            self.continuation = self._continuation_of_ours(has_bytes)
        return self.continuation is not None and self.continuation.fits(member.native, member.spec)

    def may_move(self, attempt: Attempt, member: Member) -> bool:
        """Whether, as far as is known now, this replica could go on with what the client has begun to read."""
        if not self._may_resume:
            return False
        if self.continuation is not None:
            return self.continuation.why_not is None and (member.native or member.spec.engine in TAKE_IDS)
        return attempt.framed and member.native

    def _new_continuation(self) -> Continuation | None:
        prompts = self._tokens.prompts
        if prompts is None or self._prompt.read_apart or why_alone(self._prompt, self._body) is not None:
            return None
        return Continuation(self._chat, self._prompt, self._body, prompts.tokenizer)

    def _continuation_of_ours(self, has_bytes: bool) -> Continuation | None:
        """Of a stream that a native replica began."""
        continuation = self._new_continuation()
        if continuation is not None and has_bytes:
            continuation.begun_by_ours(self._head)
            continuation.settle(unpack_ids(b"".join(self._said.get(0, ()))))
        return continuation

    @property
    def _head(self) -> tuple[str, int, str]:
        return self._response_id, self._created, self._prompt.peek.model

    # ---- what it is sent

    def foreign_body(self, member: Member) -> tuple[bytes, bytes | None]:
        """The client's own where nothing has to be added; with another path where it goes on within the answer."""
        prompt, body = self._prompt, self._body
        if prompt.salt is not None and prompt.salt != prompt.peek.cache_salt:
            body = salted(body, prompt.peek, prompt.salt)
        continuation = self.continuation
        if continuation is None:
            return body, None
        if continuation.ids:
            return continuation.resume(body, member.spec.max_model_len), COMPLETIONS_PATH
        continuation.relay()
        return with_ids(body) if says_ids(member, self._chat) else body, None

    def envelope(self, priority: float) -> bytes:
        """For a replica of ours, before the body: the prompt's token ids, and those of the answer that there are."""
        prompt = self._prompt
        if not self._response_id:
            self._response_id = chat_id() if self._chat else completion_id()
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
        )
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
        """What the client is to have of it; why the replica is lost, where it has said so itself."""
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
        """The replica is lost: what it generated is part of the answer."""
        for choice, packed in attempt.token_ids.items():
            self._said.setdefault(choice, []).extend(packed)

    def settle(self, attempt: Attempt, has_bytes: bool) -> str | None:
        """What the client has of the answer; why nobody can go on with that."""
        if not self._may_resume:
            return "resuming is switched off"
        continuation = self.continuation
        if continuation is None:
            # One that was lost before its head has added nothing to what is known.
            return None if attempt.framed or not attempt.status else "its token ids are not known"
        if continuation.head is not None:
            self._response_id, self._created, _ = continuation.head
        elif attempt.framed and has_bytes:
            continuation.begun_by_ours(self._head)
        continuation.settle(unpack_ids(b"".join(attempt.token_ids.get(0, ()))) if attempt.framed else None)
        return continuation.why_not

    def ending(self, member: Member) -> bytes | None:
        """What is missing of the stream where all tokens were generated, so that no replica has to say it."""
        continuation = self.continuation
        if continuation is None or continuation.head is None or not continuation.is_complete(member.spec.max_model_len):
            return None
        return continuation.ending()


def says_ids(member: Member, chat: bool) -> bool:
    """Whether such an engine streams its token ids when it is asked to; SGLang refuses to in chats."""
    return member.spec.engine == "vllm" or (member.spec.engine == "sglang" and not chat)
