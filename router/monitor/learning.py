"""Takes over what replicas say of themselves: their models, ranks, caches and tokenizers."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

import msgspec

from engines import profile_of
from engines.metrics import scraped_pools, scraped_queues, speculates
from engines.sources import Ask
from router.config import RouterConfig
from router.members.asking import Asking
from router.members.facts import Facts, Rank, foreign_facts, native_facts, ranks_of
from router.members.feed import Feeds
from router.members.fetch import Fetched, fetch
from router.members.members import Member, Members, Server, engine_of
from router.members.predictions import Accuracy
from router.members.spec import AUTO, BadSpec, ReplicaSpec
from router.members.verification import Verification
from router.placement.index import APPROXIMATE
from router.placement.placement import Placement
from router.prompts.tokenizer_probe import ProbeResult, probes, verdict
from router.prompts.tokenizers import Tokenizers
from router.tenants.admission import Admission

log = logging.getLogger(__name__)

USUAL_BLOCK_TOKENS = 16  # the size until an engine's events name it
PROBE_S = 2.0  # the time for an answer
LOADING = "it is still loading its model"


async def ask(server: Server, path: str, body: bytes | None = None, timeout_s: float = PROBE_S) -> Fetched:
    """Ask a replica; raise Broken if it does not answer."""
    return await fetch(server.upstream, path, body=body, lines=server.key_line, timeout_s=timeout_s)


async def described(spec: ReplicaSpec, ask: Ask, before: Facts | None = None) -> Facts:
    """Ask for all that the replica tells; `ask` raises Broken. Raise BadSpec if the answers cannot be used.

    `before`: what it told last. An engine that cannot tell its sockets this time still has the same.
    """
    is_ours = profile_of(spec.engine).describes_itself
    if is_ours or spec.engine == AUTO:
        answer = await ask("/load")
        facts = native_facts(spec, answer.body) if answer.status == 200 else None
        if facts is not None:
            return facts
        if is_ours:
            raise BadSpec(f"{spec.name} does not answer /load as a replica of ours (status {answer.status})")
    answer = await ask("/v1/models")
    if answer.status != 200:
        raise BadSpec(f"{spec.name} answers /v1/models with status {answer.status}")
    facts = foreign_facts(spec, answer.body)
    sources = await facts.profile.sources(ask)
    known = before.ranks if before is not None and sources.failed else ranks_of(facts.spec, sources)
    return msgspec.structs.replace(facts, ranks=known)


@dataclass(eq=False)
class Learning:
    """Gives each server the members that its replica describes."""

    config: RouterConfig
    members: Members
    feeds: Feeds
    placement: Placement
    admission: Admission
    tokenizers: Tokenizers
    now_s: Callable[[], float]

    def __post_init__(self) -> None:
        self.verification = Verification(ask, self.placement, self.now_s, self.config.shows_texts)
        self.asking = Asking(ask, self.now_s)
        self._processes = count(1)
        self._said_unsalted: set[str] = set()  # replicas that the log has warned of

    async def close(self) -> None:
        await self.verification.close()
        await self.asking.close()

    async def learn(self, server: Server) -> None:
        """Ask a replica what it serves; raise Broken if it does not answer, BadSpec if it cannot be used."""
        facts = await described(server.spec, partial(ask, server), server.facts if server.learned else None)
        server.learned_s = self.now_s()
        if self.members.servers.get(server.name) is not server:  # it was removed meanwhile
            return
        if facts.spec.model is None or (server.learned and facts == server.facts):
            return
        if facts.loading and facts.models == server.models:
            raise BadSpec(LOADING)
        # This fails before anything is taken over.
        self.tokenizers.of(facts.spec.model, engine_of([facts.profile]), facts.tokenizer)
        if not server.learned or facts.models[:1] != server.models[:1]:
            self._forget_process(server)
            server.verified = None
            server.process = f"{server.name} #{next(self._processes)}"
        self.arrange(server, facts.ranks)
        known = {member.why_no_events for member in server.members}
        for why in dict.fromkeys(rank.why_no_events for rank in facts.ranks):
            if why and why not in known:
                log.warning("%s: what it has cached can only be guessed: %s", server.name, why)
        server.facts, server.profile, server.learned = facts, facts.profile, True
        ranks = {rank.spec.name: rank for rank in facts.ranks}
        for member in server.members:
            member.describe(facts, ranks[member.name])
            self.placement.offers(member.load, facts.kv_read, facts.kv_layout)
            if not facts.loading:
                self._follow(member, facts.total_blocks)
        self.members.arrange()
        if facts.loading:
            raise BadSpec(LOADING)

    def arrange(self, server: Server, ranks: tuple[Rank, ...]) -> None:
        """Let the server have one member for each rank; those that it has already keep all that is known of them."""
        names = {rank.spec.name for rank in ranks}
        for name in names - server.names:
            if name in self.members.by_name:
                raise BadSpec(f"two replicas are named {name!r}, one as a rank of {server.name!r}; rename one")
        for member in list(server.members):
            if member.name not in names:
                self._drop(member)
        for rank in ranks:
            if rank.spec.name not in server.names:
                load = self.placement.add(rank.spec.name, limit=self.config.replica_limit)
                member = Member(rank.spec, load, server, Accuracy())
                self.members.by_name[member.name] = member
                server.join(member)

    def forget(self, server: Server) -> None:
        self._forget_process(server)
        for member in list(server.members):
            self._drop(member)
        self._said_unsalted.discard(server.name)

    def _drop(self, member: Member) -> None:
        """Forget one cache; its running requests may end."""
        member.server.part(member)
        del self.members.by_name[member.name]
        if member.feed is not None:
            member.feed.leave()
        self.placement.remove(member.load)

    def _follow(self, member: Member, total_blocks: int | None) -> None:
        source = member.spec.source(self.config.curve_files)
        changed = source != member.source
        if changed:  # otherwise the feed itself notices a restart
            if member.feed is not None:
                member.feed.leave()
            member.source, member.feed, member.overclaims = None, None, False
            if source is not None:
                try:
                    # Keys of another size would find nothing, so a new one is taken at once.
                    sized = partial(self.set_block_size, member)
                    member.feed = self.feeds.follow(member.name, member.slot, source, sized)
                except ValueError as error:
                    raise BadSpec(str(error)) from error
            member.source = source
        if total_blocks is not None and member.feed is not None:
            member.feed.limit(total_blocks)
        if source is None or member.spec.block_size is not None or changed:
            member.block_size = APPROXIMATE if source is None else member.spec.block_size or USUAL_BLOCK_TOKENS

    def set_block_size(self, member: Member) -> None:
        """Take a replica's block size from its events."""
        feed, block_size = member.feed, member.block_size
        if feed is None:
            return
        if feed.is_unreached:
            block_size = APPROXIMATE
        elif feed.block_sizes and block_size not in feed.block_sizes:
            block_size = min(feed.block_sizes)
        elif block_size == APPROXIMATE:
            block_size = member.spec.block_size or USUAL_BLOCK_TOKENS
        if block_size != member.block_size:
            if APPROXIMATE in (block_size, member.block_size):
                guessed = f"what it has cached is guessed: {feed.state().reason}"
                log.warning("%s: %s", member.name, guessed if feed.is_unreached else "its events are reached")
            member.block_size = block_size
            self.members.arrange()

    async def verify(self, server: Server) -> None:
        """Compare our tokenizer with the replica's: wrong tokens would be worse than none."""
        tokens = self.members.models[server.models[0]].tokens
        if tokens.prompts is None or tokens.why_not is not None:
            server.verified = "there is none here"
            return
        asked = probes(server.models[0], tokens.prompts, tokens.engine)
        answers = [await ask(server, "/tokenize", probe.body) for probe in asked]
        answered = [(answer.status, answer.body) for answer in answers]
        texts = [i for i, probe in enumerate(asked) if probe.shape is None or "prompt" in probe.what]
        found = verdict([asked[i] for i in texts], [answered[i] for i in texts])
        if found.verified and tokens.shapes is not None:
            self.verification.probed(server, tokens, asked, answered)
            found = verdict(asked, answered)
            found = ProbeResult(found.verified is not None or None, found.why)
        server.verified = found.why
        if found.verified is False:
            tokens.go_approximate(f"the tokenizer here is not that of {server.name}: {found.why}")
        elif found.verified is None:
            log.warning("%s: cannot tell if its tokenizer equals the router's: %s", server.name, found.why)
            if tokens.shapes is not None:
                tokens.shapes.unanswered(f"not verified: {found.why}", self.now_s())

    def _forget_process(self, server: Server) -> None:
        for name in server.models:
            model = self.members.models.get(name)
            if model is not None and model.tokens.shapes is not None:
                model.tokens.shapes.forget(server.process)

    def warn_of_salts(self, server: Server) -> None:
        if server.name not in self._said_unsalted and self.admission.has_salts and not server.profile.separates_salts:
            self._said_unsalted.add(server.name)
            log.warning(
                "%s: API keys are in use, but its engine (%s) may ignore the salts that separate their caches",
                server.name,
                server.members[0].spec.engine,
            )

    def scraped(self, server: Server, metrics: bytes, now_s: float) -> None:
        """Take queues and pools from an engine's metrics."""
        profile = server.profile
        queues, pools = scraped_queues(metrics, profile.metrics), scraped_pools(metrics, profile.metrics)
        for member in server.members:
            if (queue := queues.get(member.rank)) is not None:
                member.load.scraped(*queue, now_s)
            pool, size, feed = pools.get(member.rank), member.block_size, member.feed
            if feed is None:
                continue
            feed.view.resolver.speculates = speculates(metrics, profile.metrics)  # drafts may make its hits shorter
            if pool is not None and size:  # its events may name smaller blocks than its pool has
                smaller = max(1, pool.block_tokens // size)
                cacheable = pool.blocks - profile.unused_blocks
                feed.limit(pool.blocks * smaller, cacheable * smaller)
