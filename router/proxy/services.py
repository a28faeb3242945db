"""The services of the router that a request uses; `router.core.Router` has all of them, and more for others."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from starlette.types import Scope

from api.errors import ApiError
from api.http.bodies import Bodies
from router.config import RouterConfig
from router.lifecycle import Lifecycle
from router.members.asking import Asking
from router.members.members import Member, Members
from router.members.verification import Verification
from router.placement.cost import Candidate, Prompt
from router.placement.decision import Decision
from router.placement.placement import Placement
from router.placement.waiting import Waiting
from router.prompts.model_rewrites import Rules
from router.prompts.reading.client import Reading
from router.proxy.attempt import Attempt, AttemptListener
from router.proxy.exchange import Exchange
from router.proxy.flow import Flow
from router.proxy.request_summary import RequestCounts, RequestSummary
from router.proxy.responses import KeptResponses
from router.proxy.retries import Budget, RetryBudget, Row
from router.tenants.admission import Admission

T = TypeVar("T")


class Waiter(Protocol):
    """A request that waits for room."""

    exchange: Exchange
    flow: Flow

    def __hash__(self) -> int: ...
    def give_up_waiting(self) -> None: ...


class Remembers(Protocol):
    """The memory of all requests."""

    @property
    def counts(self) -> RequestCounts: ...
    def turned_away(self, scope: Scope, error: ApiError) -> None: ...


class Services(Protocol):
    members: Members
    placement: Placement
    lifecycle: Lifecycle
    bodies: Bodies
    admission: Admission
    model_rewrites: Rules
    rewriting: asyncio.Lock  # one large body at a time
    retry_budget: RetryBudget
    waiting: Waiting[Waiter]
    newcomers: Waiting[Waiter]  # requests of sessions that may not begin yet
    reading: Reading
    responses: KeptResponses
    tracing: Any  # a `Tracing`, whose package is an extra; None: nothing is traced
    held: Budget  # the budget for buffered answers
    loop: asyncio.AbstractEventLoop
    now_s: Callable[[], float]
    config: RouterConfig
    verification: Verification | None  # checks prompts for engines that build them themselves
    asking: Asking | None  # asks engines for prompts that cannot be made here

    @property
    def history(self) -> Remembers: ...
    def in_thread(self, make: Callable[[], T], size: int, done: "Callable[[asyncio.Future[T]], None]") -> None: ...
    def doubt(self, member: Member) -> str | None: ...
    def candidates_of(self, name: str) -> Sequence[Candidate]: ...
    def sent(
        self,
        owner: AttemptListener,
        member: Member,
        decision: Decision,
        prompt: Prompt,
        streams: bool,
        *,
        envelope: bool = False,
    ) -> Attempt: ...
    def answered(self, attempt: Attempt) -> None: ...
    def computed(self, attempt: Attempt) -> None: ...
    def learn(self, attempt: Attempt, row: Row, reason: str) -> None: ...
    def attempt_over(self, attempt: Attempt) -> None: ...
    def over(self, summary: RequestSummary) -> None: ...
