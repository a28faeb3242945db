"""The flow of a request: what happens to it, and what follows. It knows no socket, no task and no clock.

A shell (`request`) tells it the events, with the time where that matters, and does what it asks through a port of 12
calls. The bytes of an answer do not pass here: they go from a replica's connection to the client's by one call.

                  body         prompted       sent          head
    READING ------> PROMPTING ------> WAITING -----> SENT ------> ANSWERING
                       ^   outdated   |  ^  ^           |  refused,  |  |  broke
                       +--------------+  |  +-----------+   broke    |  +--------> MOVING
                         elsewhere    |  | computed                  |               | sent
                                      +> PREFILLING                  +-- broke       +------> SENT
                                                                         (client has nothing): WAITING

    OVER follows upon every state: the answer is complete, the client is refused or has left.

- READING: the body comes. PROMPTING: tokens are made of it, perhaps on a thread.
- WAITING: a replica is chosen at once, or when one has room, or after a pause. MOVING: the same, with the head of an
  answer or a part of it at the client, so another replica has to go on with it.
- PREFILLING: another replica computes the prompt. However that ends, the request is placed again.
- SENT: a replica has it. ANSWERING: the replica's answer comes, and may be kept until it is complete.

`TRANSITIONS` has the same as data, and an event that cannot come in a state raises `KeyError`: a mistake of ours. What
becomes of a request whose replica fails is in the table of `retries`. The flow alone counts its attempts, remembers
the replicas that have failed, and knows until when it may wait.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, cast

from msgspec import Struct

from api.errors import ApiError, queue_full
from api.generation_apis import GenerationApi
from router.members.broken import Broken, no_replica
from router.placement.cost import NONE_TRIED
from router.proxy.retries import GOES_ON, LATE, LOST, MAX_LOST, MAX_MOVES, SILENT, Next, RetryBudget, Row, loss

if TYPE_CHECKING:
    from router.placement.decision import Decision
    from router.proxy.attempt import Attempt

PAUSE_S, MAX_PAUSE_S = 0.1, 2.0  # before a retry of a request that no replica took; doubled each time
DYING_S = 0.5  # before the last try: replicas of a machine that dies do not all end at the same moment
MAX_DOUBLINGS = 16


State = IntEnum("State", "READING PROMPTING WAITING PREFILLING SENT ANSWERING MOVING OVER")
READING, PROMPTING, WAITING, PREFILLING, SENT, ANSWERING, MOVING, OVER = State
TRANSITIONS: dict[str, dict[State, State]] = {
    "body": {READING: PROMPTING},
    "prompted": {PROMPTING: WAITING},
    "outdated": {WAITING: PROMPTING},
    "elsewhere": {WAITING: PREFILLING, MOVING: PREFILLING},
    "computed": {PREFILLING: WAITING},
    "sent": {WAITING: SENT, MOVING: SENT},
    "head": {SENT: ANSWERING},
    "freed": {SENT: WAITING, ANSWERING: WAITING},  # its attempt has ended without an answer
}
_BODY, _PROMPTED, _OUTDATED, _ELSEWHERE, _COMPUTED, _SENT, _HEAD, _FREED = TRANSITIONS.values()


class Port(Protocol):
    """The port from a flow to its shell; calls are about the attempt under way where there is one."""

    @property
    def has_begun(self) -> bool: ...  # the client has the head of an answer, or more
    @property
    def may_repeat(self) -> bool: ...  # several replicas may answer it, of which one is heard: it has no other effect
    def choose(self) -> "Decision | None":
        """Choose a replica, or none; None: the prompt has to be made again, which has begun. May raise ApiError."""

    def send(self, decision: "Decision") -> bool:
        """Send, and tell `sent` or `elsewhere`; False: this replica cannot go on. May raise ApiError."""

    def queue(self, decision: "Decision", since_s: float, until_s: float, not_before_s: float) -> None:
        """Queue for room, as if it had come at `since_s`; without a place, `no_room_in_time` follows at once."""

    def learn(self, row: Row, reason: str) -> None: ...  # about the health of the attempt's replica
    def end_attempt(self) -> None: ...
    def others(self) -> bool: ...  # another replica could take the request, now or when it has room
    def complete(self) -> tuple[bool, str | None]:
        """Finish half an answer if it needs no replica. Return whether it is finished; else why none can go on."""

    def refuse(self, error: ApiError) -> None: ...  # the client has nothing of an answer
    def break_off(self, why: str) -> None: ...  # the client has a part of it
    def wake_in(self, delay_s: float) -> None: ...  # for `place`


class RequestType(Struct, frozen=True):
    """A kind of request, as the table of routes has it. What else depends on its body is asked when that has come."""

    api: str = ""  # the engines' API by which its prompt is read; empty: it is not read
    caches: bool = False  # the engine may answer from its cache, so the body needs the key's salt
    only_computes: bool = False  # else its effects are unknown
    query_names_model: bool = False
    generation: GenerationApi | None = None  # its answer is read, and continued by token ids
    of_response: bool = False  # about a response by its id, for the replica that holds it


_NO_PORT = cast(Port, None)  # no event asks for it once all is over


@dataclass(slots=True, eq=False)
class Flow:
    port: Port
    budget: RetryBudget
    patience_s: float  # the longest wait for room
    is_single: bool = False  # one replica is named to a gateway, which asks others by itself
    state: State = READING
    decision: "Decision | None" = None  # the last one
    tried: frozenset[str] = NONE_TRIED  # replicas that have failed it
    unfit: frozenset[str] = NONE_TRIED  # those among them that cannot go on with it, or took too long
    retries: int = 0
    resumes: int = 0
    is_new: bool = True  # no replica was chosen yet
    is_fresh: bool = False  # its prompt was just made
    waited_s: float = 0.0  # the time spent waiting for room
    since_s: float = 0.0  # the time of its first wait; 0: it has not waited
    _queued_s: float = 0.0  # the time of its present wait; 0: it does not wait
    _until_s: float = 0.0  # 0: it has not waited since a replica answered
    _fruitless: int = 0  # choices since a replica answered
    _lost: int = 0  # replicas, and errors after which another one was asked
    _moves: int = 0  # away from replicas that fell silent

    # ---- events until it is sent

    def body(self) -> None:
        self.state = _BODY[self.state]

    def prompted(self, pause_s: float = 0.0) -> None:
        """Go on with the prompt; `pause_s`: for peers that got a request at the same moment, and choose first."""
        self.state, self.is_fresh = _PROMPTED[self.state], not pause_s
        if pause_s:
            self.port.wake_in(pause_s)
        else:
            self.place()

    def outdated(self) -> None:
        self.state = _OUTDATED[self.state]

    def place(self) -> None:
        """Choose a replica and send the request there, or wait until one has room; do nothing if it is elsewhere."""
        port = self.port
        try:
            while self.state is WAITING or self.state is MOVING:
                decision = port.choose()
                if decision is None:
                    return
                self.decision, self.is_new, self.is_fresh = decision, False, False
                if decision.chosen is not None:
                    if port.send(decision):
                        return
                    name = decision.chosen.name
                    self.tried, self.unfit = self.tried | {name}, self.unfit | {name}
                    continue
                # It waits: full replicas will have room, and silent or missing ones may come back.
                if decision.rejection == "tried" and all(
                    one.name in self.unfit for one in decision.candidates if one.role != "prefill"
                ):
                    raise no_replica(decision.refusal())
                now_s = decision.question.now_s
                self._queued_s = self._queued_s or now_s
                self._until_s = self._until_s or now_s + self.patience_s
                again_s = 0.0
                if self.tried:
                    again_s = now_s + min(MAX_PAUSE_S, PAUSE_S * 2**self._fruitless)
                    self._fruitless = min(self._fruitless + 1, MAX_DOUBLINGS)
                if decision.rejection != "full":
                    self.tried = self.unfit  # the others may be asked again once they are back
                # A request that waits again keeps its place, and a begun answer goes before new requests.
                self.since_s = self.since_s or (decision.question.came_s if self.state is MOVING else None) or now_s
                port.queue(decision, self.since_s, self._until_s, again_s)
                return
        except ApiError as error:
            self._give_up(error)

    def no_room_in_time(self, wait_s: float) -> None:
        """Give up; `wait_s`: what the queue says of those that come now."""
        decision = self.decision
        if decision is None or decision.rejection == "full":
            why = "every replica is at its limit, and the queue is full or moves too slowly; try again"
            self._give_up(queue_full(why, wait_s))
        elif decision.rejection == "held":
            self._give_up(queue_full(f"{decision.refusal()}; try again after the seconds of Retry-After", wait_s))
        else:
            self._give_up(no_replica(decision.refusal()))

    def elsewhere(self) -> None:
        self.state = _ELSEWHERE[self.state]

    def computed(self) -> None:
        """Go on once the other replica is done with the prompt, or has failed."""
        self._free(_COMPUTED)
        self.place()

    def sent(self, now_s: float) -> None:
        self.state = _SENT[self.state]
        if self._queued_s:
            self.waited_s, self._queued_s = self.waited_s + now_s - self._queued_s, 0.0

    # ---- events of its attempt

    def head(self) -> None:
        self.state, self._until_s, self._fruitless = _HEAD[self.state], 0.0, 0

    def refused(self, attempt: "Attempt", row: Row, reason: str, now_s: float) -> bool:
        """Handle an answer of status 400 or more; return whether the client gets it as it is."""
        if self.state is OVER:
            return False
        port = self.port
        port.learn(row, reason)
        asks_another = self._asks_another(row, now_s)
        if not asks_another and not port.has_begun:
            self.head()
            return True
        attempt.cancel()
        self._free(_FREED)
        port.end_attempt()
        if asks_another:
            self._leave(attempt)
            self.place()
        else:
            port.break_off(f"{attempt.member.name} would not go on with it: {reason}")
        return False

    def broke(self, attempt: "Attempt", broken: Broken, *, has_bytes: bool) -> None:
        """Go on at another replica after a loss, from the start or from where the client's bytes end."""
        if self.state is OVER:
            return
        port, row, name = self.port, loss(broken), attempt.member.name
        port.learn(row, str(broken))
        self._free(_FREED)
        port.end_attempt()
        if self.is_single:
            port.break_off(str(broken))
            return
        self._moves += row is SILENT
        self._lost += row.retries == "three"
        if row is LATE:
            self.unfit = self.unfit | {name}
        is_finished, why_not = port.complete() if self.state is MOVING else (False, None)
        if is_finished:
            return
        if why_not is None and self._next(row) not in GOES_ON:
            why_not = "it may have had effects"
        if why_not is not None:
            if self.state is MOVING:
                port.break_off(f"{name}: {broken}; {why_not}")
            else:
                why = f"{name} was lost before it answered: {broken}; {why_not}"
                port.refuse(ApiError(502, why, "server_error", code="replica_lost"))
        elif self._lost >= MAX_LOST:
            why = f"{self._lost} replicas in a row were lost while they answered it"
            self._give_up(no_replica(f"no replica could answer: {why}"))
        else:
            self.resumes += attempt.framed or has_bytes
            if row is SILENT and not attempt.member.server.suspicion:
                self.retries += 1  # the same one is heard again, by other connections
            else:
                self._leave(attempt)
            if self._lost == MAX_LOST - 1 and row.retries == "three":
                port.wake_in(DYING_S)
            else:
                self.place()

    def unread(self, attempt: "Attempt") -> None:
        """Send the request again at once, to a replica that could not fetch the KV of its prompt."""
        attempt.cancel()
        self._free(_FREED)
        self.port.end_attempt()
        self.retries += 1
        self.place()

    def passed_over(self, reason: str) -> None:
        """Note that a gateway has sent the request to another replica than the one named, for `sent` to follow."""
        self.port.learn(LOST, reason)
        self._free(_FREED)
        self.port.end_attempt()
        self.retries += 1

    def may_leave(self) -> bool:
        """Tell whether the request may leave a silent replica, if another one can go on with it."""
        if self.is_single or self._moves >= MAX_MOVES:
            return False
        return self._next(SILENT) in GOES_ON

    def over(self, now_s: float) -> None:
        """Note the end, however it has come. The port is let go: it has a reference to the flow."""
        self.state, self.port = OVER, _NO_PORT
        if self._queued_s:
            self.waited_s += now_s - self._queued_s

    # ---- rules

    def _next(self, row: Row) -> Next:
        if self.port.has_begun:
            return row.sent
        return row.repeatable if self.port.may_repeat else row.effects

    def _asks_another(self, row: Row, now_s: float) -> bool:
        """Count a refusal; return whether to ask another replica."""
        waits = self.port.has_begun and row.retries == "any"  # half an answer, which nobody but a replica can complete
        if self.is_single or self._next(row) not in GOES_ON or not (waits or self.port.others()):
            return False
        if row.retries == "both":
            if self._lost >= MAX_LOST:
                return False
            self._lost += 1
        return row.retries == "any" or self.budget.take(now_s)

    def _free(self, after: dict[State, State]) -> None:
        """Go to the state without an attempt; with the head at the client, another replica has to go on."""
        state = after[self.state]
        self.state = MOVING if self.port.has_begun else state

    def _leave(self, attempt: "Attempt") -> None:
        """Ask at another address next: the fault of one rank may be that of all behind it."""
        self.retries += 1
        self.tried = self.tried | attempt.member.server.names | {attempt.member.name}

    def _give_up(self, error: ApiError) -> None:
        if self.port.has_begun:
            self.port.break_off(error.message)
        else:
            self.port.refuse(error)
