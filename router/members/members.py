"""All replicas, the state of each, and the models that they serve."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from api.errors import quoted, unknown_model
from api.http.prometheus import FIRST_TOKEN_S, Histogram
from engines import NATIVE, OPENAI, PROFILES, profile_of
from engines.profile import EngineProfile
from events.source import Source
from router.members.broken import no_replica
from router.members.facts import Facts, Rank
from router.members.feed import ReplicaFeed
from router.members.health import Health
from router.members.predictions import Accuracy
from router.members.spec import ReplicaSpec
from router.members.tally import Output, Seen, Tally
from router.members.upstream import Upstream
from router.placement.cost import Candidate, can_split
from router.placement.index import APPROXIMATE
from router.placement.load import ReplicaLoad
from router.placement.policy import Ring
from router.prompts.tokens import Tokens
from router.responses import FeedState

log = logging.getLogger(__name__)

# Makes tokens of a base model, the engine whose prompts are followed, and the tokenizer that a replica names.
TokensOf: TypeAlias = Callable[[str, str, str | None], Tokens]

MAX_REMEMBERED = 1000  # names of models, including those no longer served
STEP_KEPT = 0.999  # the longest step fades by this at each sign of life; there are up to ten a second
NOT_YET = "no replica has served the model yet"
MAX_GONE = 8  # models no longer served, for which requests may wait


@dataclass(slots=True, eq=False)
class Server:
    """One address, its connections and its health, which all caches behind it share.

    Each data-parallel rank is a cache of its own, and a member; most servers have only one.
    """

    spec: ReplicaSpec  # the wanted one
    upstream: Upstream
    health: Health
    key_line: bytes = b""  # `authorization` for this replica
    facts: Facts | None = None  # the last that were taken over
    profile: EngineProfile = OPENAI  # its engine's, by these facts
    learned: bool = False  # they are those of its present process
    learned_s: float = -math.inf  # the time of the last question
    members: list["Member"] = field(default_factory=list)
    names: frozenset[str] = frozenset()  # theirs
    faults: int = 0
    quiet_since_s: float = math.inf  # no byte of an answer has come since, though answers are awaited
    alive_s: float = -math.inf  # time of the last byte of an answer, health checks included
    suspicion: str = ""  # why it seems to be frozen or cut off; empty: it does not
    down_since_s: float | None = None  # when it was said that it takes no requests; None: it has taken some since
    silent_since_s: float = 0.0  # the last sign of life before the suspicion; kept after it
    suspected_s: float = 0.0  # the last suspicion's time
    recovered_s: float = math.inf  # the end of the last suspicion, until streams have had time to go on
    scraped_s: float = -math.inf  # the time of its last metrics
    steps: int | None = None  # its steps in those (`facts.scraped_steps`)
    tells_steps: bool = False  # they have changed
    worked_s: float = math.inf  # the last sign that its engine computes: its server may answer without it
    longest_step_s: float = 0.0  # between two such signs while it had work, lately
    trouble: str = ""  # reason of its last health check, if that failed
    verified: str | None = None  # result of comparing its tokenizer with ours
    process: str = ""  # a name for its present process, which no other has

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def models(self) -> tuple[str, ...]:
        """Names that clients may ask for, its base first, adapters included."""
        return () if self.facts is None else self.facts.models

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset() if self.facts is None else self.facts.adapters

    @property
    def unavailable(self) -> str | None:
        return self.members[0].candidate.unavailable

    @property
    def in_flight(self) -> int:
        return sum(member.candidate.in_flight for member in self.members)

    def works(self, now_s: float) -> None:
        """Note a sign that its engine computes."""
        if now_s == self.worked_s:  # said by another answer
            return
        for member in self.members:
            if member.candidate.in_flight and not self.health.stalled:
                self.longest_step_s = max(now_s - self.worked_s, self.longest_step_s * STEP_KEPT)
                break
        self.worked_s = now_s

    def join(self, member: "Member") -> None:
        self.members.append(member)
        self.names |= {member.name}
        self.health.candidates.append(member.candidate)
        self.health.publish()

    def part(self, member: "Member") -> None:
        self.members.remove(member)
        self.names -= {member.name}
        self.health.candidates.remove(member.candidate)


@dataclass(slots=True, eq=False)
class Member:
    """One replica, which is one cache; each part of it keeps its own changing state."""

    spec: ReplicaSpec  # completed by the replica's answers
    load: ReplicaLoad
    server: Server
    accuracy: Accuracy
    name: str = field(init=False)
    candidate: Candidate = field(init=False)
    slot: int = field(init=False)
    upstream: Upstream = field(init=False)
    health: Health = field(init=False)
    profile: EngineProfile = field(init=False)
    name_line: bytes = field(init=False)  # a header of answers to clients
    own_lines: bytes = b""  # headers of requests to it: its key, and its rank
    tallies: dict[str, Tally] = field(default_factory=dict)  # tallies by model
    salts: Seen = field(default_factory=Seen)  # sent there, for all of its models, as they differ between models
    output: Output = field(default_factory=Output)
    overclaims: bool = False  # claims more blocks than it can hold, as far as is known
    trust: float = 1.0  # factor on its claims of cached tokens
    resyncs: int = 0
    resync_after_s: float = 0.0
    source: Source | None = None  # the source of the events that are followed
    feed: ReplicaFeed | None = None
    why_no_events: str = ""
    rank: int | None = None  # its number at its engine; None: it is the only one behind its address
    incarnation: int | None = None
    block_size: int = APPROXIMATE  # the block size of its events; APPROXIMATE where it has none
    models: tuple[str, ...] = ()  # names that clients may ask it for, its base first, adapters included
    adapters: frozenset[str] = frozenset()
    taken_names: dict[str, str] = field(default_factory=dict)  # names that belong to another base model, by which
    tokenizer: str | None = None  # its name, where the replica tells it
    prefills: Counter[str] = field(default_factory=Counter)  # prompts computed here for others, by outcome
    prefill_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))  # from sending to handing over
    no_prefill_until_s: float = 0.0  # its KV cannot be used until then

    def __post_init__(self) -> None:
        self.name = self.spec.name
        self.candidate, self.slot = self.load.candidate, self.load.candidate.slot
        self.candidate.role, self.profile = self.spec.role, profile_of(self.spec.engine)
        self.upstream, self.health = self.server.upstream, self.server.health
        self.own_lines = self.server.key_line
        self.name_line = b"x-warmroute-replica: %b\r\n" % self.name.encode()

    def serves(self, name: str) -> bool:
        return name in self.models and name not in self.taken_names

    @property
    def feed_state(self) -> FeedState | None:
        """The state of its stream; None if its events are not followed."""
        return None if self.feed is None else self.feed.state()

    def index_state(self, feed: FeedState | None) -> str:
        """`exact`, `partial` or `syncing` if its events are followed, else `approximate`."""
        if feed is None or self.block_size == APPROXIMATE:
            return "approximate"
        return "exact" if feed.exact else "partial" if feed.partial else "syncing"

    def describe(self, facts: Facts, rank: Rank) -> None:
        """Take over the replica's description of itself."""
        self.spec = rank.spec
        self.rank, self.why_no_events = rank.number, rank.why_no_events
        self.own_lines = self.server.key_line + rank.header
        self.profile, self.tokenizer = facts.profile, facts.tokenizer
        self.models = facts.models
        self.adapters = facts.adapters
        self.candidate.max_model_len, self.candidate.role = facts.spec.max_model_len, rank.spec.role
        self.load.describe(facts.spec.block_size or 0, facts.total_blocks or 0)

    def tally(self, model: str) -> Tally:
        tally = self.tallies.get(model)
        if tally is None:
            tally = self.tallies[model] = Tally(self.salts)
        return tally


class ServedModel:
    """A name that clients may ask for, and the replicas of one base model that answer to it."""

    def __init__(self, name: str, lora: str | None, tokens: Tokens) -> None:
        self.name = name
        self.lora = lora
        self.base = tokens.model
        self.tokens = tokens
        self.members: list[Member] = []
        self.candidates: list[Candidate] = []  # theirs, in the same order
        self.max_model_len: int | None = None  # the longest that one of them takes; None: not known
        self.slots: dict[int, int] = {}  # the slots' masks by block size
        self.all_slots: dict[int, int] = {}  # the same where no tokens are known
        self.splits = False  # one replica may compute a prompt, and another one generate its answer
        self._ring: Ring | None = None

    def is_of(self, member: Member) -> bool:
        """Tell whether the name means the same model at this replica, which has it."""
        if self.name not in member.adapters:
            return self.lora is None
        return self.lora is not None and self.base in member.models and self.base not in member.adapters

    @property
    def ring(self) -> Ring:
        """The ring of its replicas, built on first use: for a thousand replicas that takes a fifth of a second."""
        if self._ring is None:
            self._ring = Ring(member.name for member in self.members)
        return self._ring

    @property
    def is_ours(self) -> bool:
        """Tell whether no other engine serves it."""
        return all(member.profile.takes_envelope for member in self.members)

    def arrange(self) -> None:
        self.candidates = [member.candidate for member in self.members]
        lengths = [one.max_model_len for one in self.candidates if one.max_model_len is not None]
        self.max_model_len = max(lengths) if lengths and len(lengths) == len(self.candidates) else None
        self.slots = {}
        for member in self.members:
            self.slots[member.block_size] = self.slots.get(member.block_size, 0) | 1 << member.slot
        self.all_slots = {APPROXIMATE: sum(1 << member.slot for member in self.members)}
        self.splits = can_split(member.spec.role for member in self.members)
        self._ring = None


class Members:
    """All replicas by name, and the models that they serve; call `arrange` when either has changed."""

    def __init__(self, tokens_of: TokensOf, expected: Iterable[str] = ()) -> None:
        """`expected`: models that requests may wait for before any replica has served them."""
        self.servers: dict[str, Server] = {}  # servers by the name of their spec
        self.by_name: dict[str, Member] = {}
        self.models: dict[str, ServedModel] = {}
        self.everybody: list[Candidate] = []  # the candidates of all replicas, whatever they serve
        self._once_served: dict[str, None] = {}  # names of models, those served now included
        self._gone: dict[str, ServedModel] = {}  # the newest of the models not served now
        # These have no replicas. Waiting prompts are made again by the first one: its engine decides how.
        self.expected = {
            name: ServedModel(name, None, Tokens(name, why_not=NOT_YET, strict=False)) for name in expected
        }
        self._tokens_of = tokens_of

    def __iter__(self) -> Iterator[Member]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def __contains__(self, member: Member) -> bool:
        """Tell whether the member has not left, even if another one has its name or its slot now."""
        return self.by_name.get(member.name) is member

    def server(self, name: str) -> Server | None:
        """Return the server of a replica, or of the replica of this name that has several ranks."""
        member = self.by_name.get(name)
        return self.servers.get(name) if member is None else member.server

    def model(self, name: str) -> ServedModel:
        """Return this model; raise ApiError if no replica serves it. A model just gone has no candidates yet."""
        served = self.models.get(name) or self._gone.get(name) or self.expected.get(name)
        if served is not None:
            return served
        if name in self._once_served:
            raise no_replica(f"the model {quoted(name)} has no replica at the moment")
        if not (self.models or self.expected or self._once_served):
            raise no_replica("no replica has reported its models yet")
        raise unknown_model(name, self.models)

    def check_served(self, name: str | None) -> None:
        """Raise ApiError if no replica serves this model; for None, if no replica is there, was or is expected."""
        if name is not None:
            self.model(name)
        elif not (self.by_name or self._once_served or self.expected):
            raise no_replica("there is no replica")

    def forget(self, name: str) -> None:
        """Let no request wait for a model that no replica serves any more."""
        if name not in self.models:
            self._gone.pop(name, None)
            self._once_served.pop(name, None)

    def arrange(self) -> None:
        self.by_name = {member.name: member for server in self.servers.values() for member in server.members}
        self.everybody = [member.candidate for member in self]
        by_base: dict[str, list[Member]] = {}  # a model's `Tokens` depend on all engines that serve it, in any order
        for member in self:
            for base in member.models[:1]:
                by_base.setdefault(base, []).append(member)
        tokens = {
            base: self._tokens_of(
                base,
                engine_of(one.profile for one in members),
                next((one.tokenizer for one in members if one.tokenizer is not None), None),
            )
            for base, members in by_base.items()
        }
        models: dict[str, ServedModel] = {}
        for member in self:
            taken: dict[str, str] = {}
            for name in member.models:
                served = models.get(name)
                if served is None:
                    base = member.models[0]
                    lora = name if name in member.adapters else None
                    served = models[name] = ServedModel(name, lora, tokens[base])
                if served.is_of(member):
                    served.members.append(member)
                else:
                    taken[name] = served.base
            for name, base in taken.items():
                if member.taken_names.get(name) != base:
                    what = f"its {quoted(name)} is not used, as that name is taken by a replica of the model"
                    log.warning("%s: %s %s; give one of them another name", member.name, what, quoted(base))
            member.taken_names = taken
        for name, served in models.items():
            served.arrange()
            if (before := self.models.get(name)) is not None and before.tokens is not served.tokens:
                # A replica has other tokens, which stays so; and all are compared anew, as their engines have changed.
                if before.tokens.prompts is not None and before.tokens.why_not is not None:
                    served.tokens.go_approximate(before.tokens.why_not)
                for member in served.members:
                    member.server.verified = None
        for name in self.models.keys() - models.keys():
            gone = self._gone[name] = self.models[name]
            gone.members = []
            gone.arrange()
        for name in models:
            self._gone.pop(name, None)
        _keep_newest(self._gone, MAX_GONE)  # each has a tokenizer
        self.models = models
        self._once_served.update(dict.fromkeys(models))
        _keep_newest(self._once_served, MAX_REMEMBERED)


def engine_of(profiles: Iterable[EngineProfile]) -> str:
    """The engine whose prompts are followed for a model: ours if it is alone, one that is known, or none."""
    found = set(profiles)
    followed = [one.name for one in PROFILES.values() if one in found and (one.prompts or found == {NATIVE})]
    return followed[0] if followed else ""


def approximate_prompts(models: Iterable[ServedModel]) -> Counter[tuple[str, str]]:
    """Count prompts that were matched by their bytes, by model and reason; adapters share the count of their base."""
    counts: Counter[tuple[str, str]] = Counter()
    for tokens in {id(model.tokens): model.tokens for model in models}.values():
        counts.update({(tokens.model, reason): count for reason, count in tokens.approximated.items()})
    return counts


def _keep_newest(by_name: dict[str, Any], most: int) -> None:
    for name in list(islice(by_name, max(0, len(by_name) - most))):
        del by_name[name]
