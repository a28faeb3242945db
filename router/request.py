"""A generation request as the core, the accounting and the traces see it; `routing.Routing` is what it is."""

from collections.abc import Mapping
from typing import Any, Protocol

from api.errors import ApiError
from router.admission import Admitted
from router.attempt import Owner
from router.exchange import Exchange
from router.members import Member, ServedModel
from router.noted import Noted
from router.placement.decision import Decision
from router.placement.index import Matches
from router.placement.placement import Prediction
from router.prompt import Peek, Prompt


class Request(Owner, Protocol):
    admitted: Admitted
    chat: bool
    peek: Peek
    prompt: Prompt
    model: ServedModel | None
    tried: frozenset[str]  # replicas that have failed it
    unfit: frozenset[str]  # of these, those that are not asked again
    is_over: bool
    why: str  # it ended without an answer
    # The choice, and what it promised:
    decision: Decision | None
    chosen: Member | None
    block_size: int
    prediction: Prediction | None
    reported_tokens: int | None
    retries: int
    resumes: int
    # Times:
    arrived_s: float
    came_s: float  # all of its body
    first_byte_s: float  # 0: none has come
    queued_s: float  # when it began to wait for room; 0: it does not
    since_s: float  # when it did so first
    waits_until_s: float  # 0: it has not waited since a replica answered
    again_s: float  # not to be tried before
    fruitless: int  # tries, since a replica answered
    waited_s: float
    noted: Noted | None  # for the request log
    trace: Any  # router.tracing.Trace, whose package is an extra; None: it is not traced

    def __hash__(self) -> int: ...
    @property
    def exchange(self) -> Exchange: ...
    @property
    def priority_s(self) -> float: ...
    @property
    def session(self) -> str | None: ...
    def prompted(self, prompt: Prompt) -> None: ...
    def found(self, peek: Peek) -> ServedModel: ...
    def made(self, body: bytes | None, prompt: Prompt) -> None: ...
    def place(self) -> None: ...
    def predict(self, member: Member, matches: Mapping[int, Matches]) -> None: ...
    def refuse(self, error: ApiError) -> None: ...
    def give_up(self, error: ApiError) -> None: ...
