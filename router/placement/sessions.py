"""Sessions of agents, and the working set: new ones begin only while the contexts of all fit into the caches.

A session's turns come one after the other, each with what was said before. If more sessions are active than the caches
hold, each turn finds its KV evicted by the others, and all wait for what was computed already. So a new session waits
for a place then, in fair order over tenants, and those that have begun go on.

Nobody sets the bound. Where computing again what was lost keeps the replicas busy for more than BUSY of the time, fewer
sessions may go on, and otherwise more. While little is lost, nobody is held, and nothing is decided here.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from router.placement.ages import Reuse
from router.placement.cost import ASSUMED_TOKENS_PER_S, Candidate, Question
from router.placement.outbox import PeerTurn
from router.placement.prices import CPU, price

LOST = 0.1  # the part of tokens computed before that is computed again; below it, nobody needs to be held
BUSY = 0.6  # the share of what could be computed; beyond it prompts wait for each other
GAIN = 0.5  # how far the bound moves at the end of a window: this much of the difference to BUSY,
LEAST_STEP, MAX_STEP = -0.2, 0.1  # within these limits
WINDOW = 3.0  # turns with this many times the tokens of all caches are one window
FIRST_WINDOW = 0.5  # the same while nobody is held: to begin late is to begin with too many
FIRST_BOUND, LEAST_BOUND = 1.4, 0.7  # multiples of all caches
SMALL = 0.01  # of one cache: a session whose first prompt is smaller is not held
SHARED = 0.1  # the part of the way to the bound that another router tells with a turn
GONE_S = 900.0  # a session that was silent for so long takes no place
MAX_MODELS = 1024  # of which other routers may tell
MAX_SESSIONS = 2**16  # the longest silent ones are forgotten
MAX_WAITING = 4096  # sessions; others wait without a place in the order
MAX_BEGINS = 32  # at once
EARLY, USUAL_WAIT_S, MAX_WAIT_S = 0.5, 60.0, 120.0  # the part of its wait told to a client; while unknown; at most
ABSENT_S = 60.0  # a client that comes so much later than it was told to has lost its place in the order


class Session(Struct, eq=False, gc=False):
    party: str  # whose it is; empty: there are no tenants
    tokens: int = 0  # of its newest prompt
    turns: int = 0
    running: int = 0  # its turns under way
    last_s: float = 0.0  # when one began or ended
    gap_s: float | None = None  # from the end of a turn to the begin of the newest one
    replica: str = ""  # the newest turn's


class Turn(Struct, frozen=True, eq=False, gc=False):
    """A prompt of a session that has had others before."""

    working_set: "WorkingSet"
    session: Session
    tokens: int
    known_tokens: float  # computed before, somewhere

    def ended(self, now_s: float) -> None:
        self.session.running -= 1
        self.session.last_s = now_s


class Newcomer(Struct, eq=False, gc=False):
    """A session that waits to begin."""

    party: str
    weight: float
    tokens: int
    since_s: float
    until_s: float  # its place in the order is kept until then
    is_here: bool = True  # its client waits; else it was told to come again


class WorkingSet:
    """Sessions of one model; `tick` brings the size of its caches."""

    def __init__(self, reuse: Reuse) -> None:
        self.capacity_tokens = 0.0
        self.smallest_tokens = 0.0  # the smallest cache
        self.bound = FIRST_BOUND
        self.is_on = False
        self.lost = 0.0  # in the last window
        self.active_tokens = 0.0  # tokens of the sessions that will likely go on, when last counted
        # By the client's name for it, or by the last page of its newest prompt; the longest silent one is first.
        self.sessions: OrderedDict[str | int, Session] = OrderedDict()
        self.waiting: dict[str, Newcomer] = {}
        self._reuse = reuse
        self._parties: defaultdict[str, float] = defaultdict(float)  # their part of `active_tokens`
        self._begun: list[str] = []  # those that waited, and begin at another router or within another session
        self._begun_s: deque[float] = deque(maxlen=32)
        self._known = self._lost = 0.0  # tokens in this window
        self._work = self._could = 0.0  # tokens that replicas have computed in this window, and could have
        self._ticked_s = self._assigned = 0.0  # the last tick, and all tokens that replicas were given until then

    @property
    def bound_tokens(self) -> float:
        """The most tokens of sessions that go on; 0: nobody is held."""
        return self.bound * self.capacity_tokens if self.is_on else 0.0

    def tick(self, now_s: float, candidates: Iterable[Candidate]) -> list[str]:
        """Count what there is; return the waiting sessions that may begin now, and have begun."""
        if not self.sessions:
            return []
        sizes, assigned = [], 0.0
        for one in candidates:
            if (ages := one.ages) is not None and one.unavailable is None:
                # Host memory counts as far as bringing KV from there is cheaper than computing it.
                share = 1.0 - price(CPU, one.load_tokens_per_s, one.prefill_tokens_per_s) if ages.host_pages else 0.0
                sizes.append((ages.capacity_pages + share * ages.host_pages) * ages.page_tokens)
                rate = one.prefill_tokens_per_s or ASSUMED_TOKENS_PER_S
                assigned += one.assigned_tokens
                self._could += rate * min(1.0, now_s - self._ticked_s)  # more is a standstill, or no session
        self._work += max(0.0, assigned - self._assigned)
        self._ticked_s, self._assigned = now_s, assigned
        self.capacity_tokens, self.smallest_tokens = sum(sizes), min(sizes, default=0.0)
        begins, self._begun = self._begun, []
        if not self.is_on:
            return begins
        self._count(now_s)
        self.waiting = {name: one for name, one in self.waiting.items() if one.until_s >= now_s}
        if not self.waiting and self.active_tokens < self.capacity_tokens:
            self.is_on = False
        while len(begins) < MAX_BEGINS and (
            here := [  # first the one whose party has the least for each of its shares
                (self._parties.get(one.party, 0.0) / one.weight, one.since_s, name)
                for name, one in self.waiting.items()
                if one.is_here
            ]
        ):
            name = min(here)[-1]
            newcomer = self.waiting[name]
            if not self._fits(newcomer.tokens):
                break
            del self.waiting[name]
            self.sessions[name] = Session(newcomer.party, newcomer.tokens, last_s=now_s)
            self._takes(newcomer.party, newcomer.tokens)
            self._begun_s.append(now_s)
            begins.append(name)
        return begins

    def may_begin(self, question: Question) -> bool:
        """Tell whether a prompt may be computed now. Those of no session are not held, nor sessions within another."""
        if not self.is_on or question.session is None or question.tokens < SMALL * self.smallest_tokens:
            return True
        name = name_of(question)
        if name in self.sessions or (question.within and name_of(question, question.within) in self.sessions):
            return True
        return not self.waiting and self._fits(question.tokens)

    def wait(self, question: Question, until_s: float) -> None:
        """Queue a session that may not begin; its place is kept until then, or until its client was told to come."""
        name, tenant = name_of(question), question.tenant
        if (newcomer := self.waiting.get(name)) is not None:
            newcomer.until_s, newcomer.is_here = max(newcomer.until_s, until_s), True
        elif len(self.waiting) < MAX_WAITING:
            party, weight = ("", 1.0) if tenant is None else (tenant.name, tenant.weight)
            self.waiting[name] = Newcomer(party, weight, question.tokens, question.now_s, until_s)

    def come_again_s(self, name: str, now_s: float) -> float:
        """Estimate the time until a waiting session may begin, for its client to come again then."""
        pace = self._begun_s
        each_s = (now_s - pace[0]) / len(pace) if pace else USUAL_WAIT_S
        newcomer = self.waiting.get(name)
        before = sum(newcomer is None or one.since_s < newcomer.since_s for one in self.waiting.values())
        wait_s = min(MAX_WAIT_S, max(1.0, EARLY * (before + 1) * each_s))
        if newcomer is not None:
            newcomer.until_s, newcomer.is_here = now_s + wait_s + ABSENT_S, False
        return wait_s

    def rows(self, now_s: float, limit: int) -> dict[str, Any]:
        """Tell of the sessions that wait, the oldest first, then of those that had a turn, the newest first."""
        return {
            "context_tokens": self.active_tokens,
            "bound_tokens": self.bound_tokens,
            "lost": self.lost,
            "longest_wait_s": {one.party: now_s - one.since_s for one in reversed(self.waiting.values())},  # by tenant
            "sessions": [
                {
                    "session": name.lstrip("/"),
                    "context_tokens": it.tokens,
                    "waits_s": now_s - it.since_s,
                    "is_here": it.is_here,
                }
                for name, it in islice(self.waiting.items(), limit)
            ]
            + [
                {
                    "session": key.lstrip("/") if isinstance(key, str) else f"(page {key:016x})",
                    "context_tokens": one.tokens,
                    "turns": one.turns,
                    "running": one.running,
                    "gap_s": one.gap_s,
                    "idle_s": 0.0 if one.running else now_s - one.last_s,
                    "replica": one.replica,
                }
                for key, one in islice(reversed(self.sessions.items()), limit)
            ],
        }

    # ---- turns

    def turn(self, told: PeerTurn, pages: Sequence[int], known_tokens: float, replica: str, now_s: float) -> Turn:
        """Note a prompt that this router or another one sends, of which so many tokens were computed before."""
        sessions, tokens = self.sessions, told.tokens
        if told.session:
            key: str | int = told.session
            session = sessions.get(key)
        else:
            key = pages[-1]
            session = next((found for page in reversed(pages) if (found := sessions.pop(page, None)) is not None), None)
        if session is None:
            session = Session(told.party)
            if len(sessions) >= MAX_SESSIONS:
                sessions.popitem(last=False)
            if told.session:
                if self.waiting.pop(told.session, None) is not None:
                    self._begun.append(told.session)
                self._takes(told.party, tokens)
        sessions[key] = session
        sessions.move_to_end(key)
        if session.turns and not session.running:
            session.gap_s = now_s - session.last_s
        session.tokens = max(tokens, session.tokens) if session.running else tokens
        session.turns += 1
        session.running += 1
        session.last_s, session.replica = now_s, replica
        return Turn(self, session, tokens, known_tokens if session.turns > 1 else 0.0)

    def heard(self, bound: float) -> None:
        """Approach the bound of another router, which has seen other turns; 0: it holds nobody."""
        if bound:
            self.bound += (bound - self.bound) * (SHARED if self.is_on else 1.0)
            self.is_on = True

    def computed(self, turn: Turn, tokens: int, foreseen_tokens: int, now_s: float) -> None:
        """Note how much was computed in the end: by then, more may have been evicted than was foreseen.

        At the end of a window, move the bound by what was lost, where the bound was what mattered.
        """
        self._work += tokens - foreseen_tokens
        self._known += turn.known_tokens
        self._lost += min(turn.known_tokens, max(0.0, turn.known_tokens - (turn.tokens - tokens)))
        if self._known < (WINDOW if self.is_on else FIRST_WINDOW) * self.capacity_tokens or not self.capacity_tokens:
            return
        self.lost, busy = self._lost / self._known, self._work / max(1.0, self._could)
        self._known = self._lost = self._work = self._could = 0.0
        self._count(now_s)
        if not self.is_on:
            self.is_on = self.lost > LOST and busy > BUSY and self.active_tokens > self.capacity_tokens
            return
        full = self.active_tokens / (self.bound * self.capacity_tokens)
        step = max(LEAST_STEP, min(MAX_STEP, GAIN * (BUSY - busy))) if self.lost > LOST else MAX_STEP
        if (step < 0 and full < 1.05) or (step > 0 and full > 0.9 and self.waiting):
            self.bound = max(LEAST_BOUND, self.bound * (1 + step))

    def _fits(self, tokens: int) -> bool:
        is_known = self.active_tokens and self.capacity_tokens  # else nobody knows the caches any more
        return not is_known or self.active_tokens + tokens <= self.bound_tokens

    def _takes(self, party: str, tokens: float) -> None:
        self.active_tokens += tokens
        self._parties[party] += tokens

    def _count(self, now_s: float) -> None:
        """Add up the contexts; one whose session is silent counts as far as prompts come again after so long."""
        self.active_tokens = 0.0
        self._parties.clear()
        for key, session in reversed(self.sessions.items()):
            idle_s = 0.0 if session.running else now_s - session.last_s
            if idle_s > GONE_S:
                break
            if session.turns > 1 or isinstance(key, str):
                self._takes(session.party, session.tokens * (self._reuse.chance(idle_s) if idle_s else 1.0))


def name_of(question: Question, session: str | None = None) -> str:
    """Name the question's session, or another one of its client: what one tenant calls its own is not another's."""
    party = "" if question.tenant is None else question.tenant.name
    return f"{party}/{session or question.session}"
