"""Makes a record of each request that comes: its prompt, and warmroute's choice by the caches of this moment.

Where requests went is found from the events, if nobody tells: the replica that stores a prompt's last block has
computed it.
"""

import logging
import re
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from api.errors import ApiError
from api.generation_apis import PATHS
from lab.shadow.incoming import Incoming
from router.http.explaining import api_of, read_prompt
from router.members.members import ServedModel
from router.members.upstream import Header
from router.placement.decision import Decision
from router.placement.holders import slots_of
from router.placement.index import APPROXIMATE
from router.prompts.prompt import Peek, Prompt
from router.proxy.facts import decide
from router.proxy.headers import session_of
from router.proxy.services import Services
from router.tenants.admission import Admitted
from router.tenants.keys import Key

MAX_REQUESTS = 100_000
MAX_BLOCKS = 16_000_000  # the blocks of all prompts: 128 MB

# How it is known where a request went: the file or a header says so; only one replica stored its last block; that block
# was cached before, at one replica; or at several.
Source: TypeAlias = Literal["told", "stored", "held", "one of several"]


class AtOnce(Struct, frozen=True):
    """Warmroute's choice, and the tokens cached at every replica, when the request came."""

    chosen: str
    hits: dict[str, float]

    @property
    def hit(self) -> float:
        return self.hits[self.chosen]


class Record(Struct, kw_only=True):
    ts: float
    request_id: str
    model: str
    tokens: int
    block_tokens: int
    keys: "array[int]"  # keys of the prompt's full blocks
    exact: bool
    cached_tokens: int | None = None  # the replica's figure
    output_tokens: int | None = None
    ttft_s: float | None = None
    replica: str | None = None  # the replica that it went to; None: unknown
    source: Source | None = None
    at_once: AtOnce | None = None  # None: it was seen too late


class Records:
    def __init__(self, most_requests: int = MAX_REQUESTS, most_blocks: int = MAX_BLOCKS) -> None:
        self.dropped = 0
        self._most_requests = most_requests
        self._most_blocks = most_blocks
        self._kept: deque[Record] = deque()
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._kept)

    def add(self, record: Record) -> None:
        self._kept.append(record)
        self._blocks += len(record.keys)
        while len(self._kept) > self._most_requests or self._blocks > self._most_blocks:
            self._blocks -= len(self._kept.popleft().keys)
            self.dropped += 1


class AtOnceSums(Struct, frozen=True):
    """Requests of which it is known where they went and what was cached then."""

    requests: int = 0
    tokens: int = 0
    served_hit: float = 0.0
    chosen_hit: float = 0.0


def at_once_sums(records: Iterable[Record]) -> AtOnceSums:
    requests = tokens = 0
    served_hit = chosen_hit = 0.0
    for record in records:
        seen = record.at_once
        if seen is not None and record.replica in seen.hits:
            requests, tokens = requests + 1, tokens + record.tokens
            served_hit, chosen_hit = served_hit + seen.hits[record.replica], chosen_hit + seen.hit
    return AtOnceSums(requests, tokens, served_hit, chosen_hit)


WITHIN_S = 60.0  # the time from the arrival to the end of its prefill
MAX_SOUGHT = 4096


class _Sought(NamedTuple):
    record: Record
    held: int  # mask of the replicas that had the block before
    until_s: float


class Whereabouts:
    """`seek` each request as it comes, and `settle` often: a block may be evicted soon."""

    def __init__(self, holders: Callable[[int, int], int], name_of: Callable[[int], str | None]) -> None:
        """`holders`: the mask of the replicas that have a block of this size and key; `name_of`: a slot's replica."""
        self._holders = holders
        self._name_of = name_of
        self._sought: deque[_Sought] = deque()
        self._claimed: dict[int, int] = {}  # the replicas of each key that earlier requests account for
        self._waiting: Counter[int] = Counter()  # requests by key
        self._turn = 0  # among several replicas that may all have served a request

    def __len__(self) -> int:
        return len(self._sought)

    def seek(self, record: Record, now_s: float) -> None:
        """Look for the replica of a request that has just come, if its prompt fills a block."""
        if not record.keys or len(self._sought) >= MAX_SOUGHT:
            return
        key = record.keys[-1]
        self._waiting[key] += 1
        self._sought.append(_Sought(record, self._holders(record.block_tokens, key), now_s + WITHIN_S))

    def settle(self, now_s: float) -> None:
        """Note what can be told by now; after a while, that nobody has computed it."""
        for _ in range(len(self._sought)):
            one = self._sought.popleft()
            record, key = one.record, one.record.keys[-1]
            new = self._holders(record.block_tokens, key) & ~one.held & ~self._claimed.get(key, 0)
            if new:
                slot = next(iter(slots_of(new)))
                self._claimed[key] = self._claimed.get(key, 0) | 1 << slot
                self._found(record, slot, "stored")
            elif now_s >= one.until_s:
                self._give_up(one)
            else:
                self._sought.append(one)

    def end(self) -> None:
        """Decide the rest by what is known now."""
        while self._sought:
            self._give_up(self._sought.popleft())

    def _give_up(self, one: _Sought) -> None:
        """Take a replica that could serve the prompt without storing anything."""
        slots = list(slots_of(one.held | self._claimed.get(one.record.keys[-1], 0)))
        if not slots:
            self._forget(one.record)
            return
        self._turn += 1
        source: Source = "held" if len(slots) == 1 else "one of several"
        self._found(one.record, slots[self._turn % len(slots)], source)

    def _found(self, record: Record, slot: int, source: Source) -> None:
        name = self._name_of(slot)
        if name is not None:
            record.replica, record.source = name, source
        self._forget(record)

    def _forget(self, record: Record) -> None:
        key = record.keys[-1]
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]
            self._claimed.pop(key, None)


LATE_S = 1.0  # after that, the caches may have changed, by this very request for one
SCHEME = re.compile("^https?://")
MAX_WHY = 64  # reasons that are told apart
OWN_MISTAKE = "failed here"

log = logging.getLogger(__name__)


class Placing:
    def __init__(self, services: Services, skipped: Counter[str], key: Key | None = None) -> None:
        self.records = Records()
        self.seen = 0
        self.late = 0
        self.approximate: Counter[str] = Counter()  # prompts by reason
        self.unnamed: Counter[str] = Counter()  # requests by a told replica that is not here
        self._services = services
        self._skipped = skipped
        self._key = key  # the client's, with the salt of its prompts
        self.whereabouts = Whereabouts(
            lambda size, key: next(iter(services.placement.index_of(size).holders([key]))),
            lambda slot: next((member.name for member in services.members if member.slot == slot), None),
        )

    async def take(self, incoming: Incoming, headers: Sequence[Header] = ()) -> Record | None:
        """Place a request, and keep its record; count it as skipped if it cannot be placed."""
        self.seen += 1
        path = PATHS.get(incoming.path)
        try:
            api = api_of(None if path is None else path.name, incoming.body)
            services, admitted = self._services, Admitted(incoming.request_id, key=self._key)
            peek, prompt = await read_prompt(services.members, services.reading, incoming.body, admitted, api)
            model = services.members.model(peek.model)
            return self._keep(incoming, peek, prompt, model, headers)
        except ApiError as error:
            self._skipped[error.code or f"status {error.status}"] += 1
        except Exception:  # a mistake of our own costs only this request
            if not self._skipped[OWN_MISTAKE]:  # logged once
                log.exception("A request could not be placed; more of them are only counted")
            self._skipped[OWN_MISTAKE] += 1
        return None

    def _keep(
        self, incoming: Incoming, peek: Peek, prompt: Prompt, model: ServedModel, headers: Sequence[Header]
    ) -> Record:
        now_ts = time.time()
        if not prompt.exact:
            known = len(self.approximate) < MAX_WHY
            self.approximate[(prompt.why_not or "") if known else "other reasons"] += 1
        size = max(model.slots, default=APPROXIMATE) if prompt.exact else APPROXIMATE
        record = Record(
            ts=now_ts if incoming.ts is None else incoming.ts,
            request_id=incoming.request_id or f"#{self.seen}",
            model=prompt.model,
            tokens=prompt.tokens,
            block_tokens=size,
            keys=array("Q", prompt.keys(size)),
            exact=prompt.exact,
            cached_tokens=incoming.cached_tokens,
            output_tokens=incoming.output_tokens,
            ttft_s=incoming.ttft_s,
        )
        self.records.add(record)
        self._locate(record, incoming.replica, is_late := now_ts - record.ts > LATE_S)
        if is_late:
            self.late += 1
        elif prompt.exact:
            session = session_of(headers, peek.prompt_cache_key)
            decision, _ = decide(self._services, model, prompt, None if session is None else session.key)
            record.at_once = at_once(decision)
        return record

    def _locate(self, record: Record, told: str | None, is_late: bool) -> None:
        """Note where it went if that is told; else look for it, if it has only just come."""
        members, member = self._services.members, None
        if told is not None:  # its name or address tells, or the name in its topic, which those of a fleet do
            topics = (one for one in members if (one.spec.topic or "").split("@")[1:2] == [told])
            member = members.by_name.get(SCHEME.sub("", told).rstrip("/")) or next(topics, None)
        if member is not None:
            record.replica, record.source = member.name, "told"
            return
        if told is not None and (told in self.unnamed or len(self.unnamed) < MAX_WHY):
            self.unnamed[told] += 1
        if not is_late and record.block_tokens != APPROXIMATE:
            self.whereabouts.seek(record, self._services.now_s())


def at_once(decision: Decision) -> AtOnce | None:
    """The choice, with the tokens of the prompt that each replica need not compute; None if no replica takes it."""
    if decision.chosen is None:
        return None
    tokens = decision.question.tokens
    hits = {
        one.name: max(0.0, tokens - decision.portions_of(index)[-1].tokens)
        for index, one in enumerate(decision.candidates)
    }
    return AtOnce(decision.chosen.name, hits)
