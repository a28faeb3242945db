"""One placement: from a prompt to a choice, and the effects of that choice while its request runs.

Pure: time is an argument, nothing waits. The router and `simulate` call it: they ask a
`question`, let it `decide`, and then say when the request was `sent`, has `begun` and has `ended`.
"""

import random
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from math import ceil

from router.placement.ages import CacheAges, Reuse, page_tokens, pages_of
from router.placement.classes import Objectives, Outlook
from router.placement.cost import NONE_TRIED, NOTHING, NOTHING_BELOW, Candidate, Half, Prompt, Question, Tenant
from router.placement.decision import Decision
from router.placement.elsewhere import Transfers
from router.placement.index import APPROXIMATE, USUAL_BLOCKS, Approximate, Matches, PrefixIndex
from router.placement.load import Placed, ReplicaLoad
from router.placement.outbox import Outbox, PeerRequest, PeerTurn, Turns
from router.placement.policy import Ring, choose
from router.placement.sessions import MAX_MODELS, Turn, WorkingSet, name_of
from router.placement.shares import Shares

QUEUE_MARGIN = 2.0  # requests occasionally wait for this multiple of the estimate


class Placement:
    def __init__(
        self,
        policy: str,
        *,
        optimistic_ttl_s: float = 30.0,
        first_token_timeout_s: float,
        approximate_blocks: int = USUAL_BLOCKS,
        optimistic: bool = True,
        working_sets: bool = False,
        seed: int | None = None,
    ) -> None:
        """`working_sets`: new sessions wait while those that have begun do not fit into the caches."""
        self.policy = policy
        self._holds = working_sets and policy == "cost"
        self.index = PrefixIndex()
        self.guesses = PrefixIndex()  # guesses for replicas that have no events; the slots are the index's
        self.approximate = Approximate(self.guesses, approximate_blocks)
        self.reuse = Reuse()
        self.working_sets = defaultdict[str, WorkingSet](lambda: WorkingSet(self.reuse))  # by base model
        self.transfers = Transfers()
        self.doubted: dict[int, float] = {}  # each slot's factor on claims, if they were wrong
        self._readable = 0  # a mask of the replicas that neighbours may read
        self.outbox: Outbox | None = None  # this router's news for its peers, if it has any
        self.hear: Callable[[], None] | None = None  # reads the news of other workers
        self.turns = Turns()  # among the peers
        self.shares = Shares()
        self.objectives = Objectives()
        self._optimistic = optimistic
        self._optimistic_ttl_s = optimistic_ttl_s
        self._first_token_timeout_s = first_token_timeout_s
        self._rng = random.Random(seed)
        self._questions = 0
        self._ids = count(1)

    # ---- replicas

    def add(self, name: str, *, limit: int = 0, block_size: int = 0, total_blocks: int = 0) -> ReplicaLoad:
        """Add a replica; return its load, which holds its candidate. 0: no limit; a cache of unknown size."""
        slot = self.index.add()
        guessed = self.guesses.add()
        assert guessed == slot, f"slot {slot} of the index is {guessed} among the guesses"
        candidate = Candidate(name, slot, limit=limit, ages=CacheAges(self.reuse))
        return ReplicaLoad(candidate, block_size=block_size, total_blocks=total_blocks)

    def remove(self, load: ReplicaLoad) -> None:
        """Forget a replica. Its feed is to leave the index first."""
        candidate = load.candidate
        self.trust(candidate.slot, 1.0)  # the slot may be another's
        candidate.ages = None  # decisions remember the candidate
        self.offers(load, "", "")
        self.approximate.clear(candidate.slot)
        self.guesses.drop(candidate.slot)
        self.index.drop(candidate.slot)

    def restarted(self, load: ReplicaLoad) -> None:
        """Forget the cache and the requests of a restarted replica."""
        slot = load.candidate.slot
        load.forget()
        self.index.optimistic.drop(slot)
        self.approximate.clear(slot)
        self._readable &= ~(1 << slot)

    def offers(self, load: ReplicaLoad, kv_read: str, kv_layout: str) -> None:
        """Note the endpoint at which neighbours may read the replica's blocks, and the blocks' layout; empty: none."""
        candidate = load.candidate
        candidate.kv_read, candidate.kv_layout = (kv_read, kv_layout) if kv_read and kv_layout else ("", "")
        bit = 1 << candidate.slot
        self._readable = self._readable | bit if candidate.kv_read else self._readable & ~bit

    def trust(self, slot: int, trust: float) -> None:
        """Multiply the replica's claims of cached tokens by this factor from now on."""
        if trust == 1.0:
            self.doubted.pop(slot, None)
        else:
            self.doubted[slot] = trust

    def index_of(self, block_size: int) -> PrefixIndex:
        return self.guesses if block_size == APPROXIMATE else self.index

    # ---- a decision

    def pause_s(self, candidates: Sequence[Candidate]) -> float:
        """Return how long to wait before the first choice for a request: until peers have made theirs."""
        if self.outbox is None or not self.outbox.gathers or not candidates:
            return 0.0
        return self.turns.pause_s(len(candidates), candidates[0].prefill_tokens_per_s)

    def question(
        self,
        prompt: Prompt,
        slots: Mapping[int, int],
        now_s: float,
        *,
        session: str | None = None,
        within: str | None = None,
        model: str = "",
        tried: frozenset[str] = NONE_TRIED,
        came_s: float | None = None,
        half: Half = "decode",
        counts: bool = True,
        tenant: Tenant | None = None,
        further_tokens: int = 0,
    ) -> tuple[Question, dict[int, Matches]]:
        """The question for a prompt, and its matches by block size. `slots`: a mask of replicas by block size.

        `counts`: it is a turn of round-robin, as only one question of each request should be. `further_tokens`: of
        more prompts of the same request.
        """
        if self.hear is not None:
            self.hear()
        matched: dict[int, float] = {}
        below: dict[str, dict[int, float]] = {}
        awaited: dict[int, float] = {}
        readable: dict[int, float] = {}
        by_size: dict[int, Matches] = {}
        for size, mask in slots.items():
            index = self.guesses if size == APPROXIMATE else self.index
            usable = prompt.tokens - 1 if size else None  # the last token is always computed
            readers = self._readable & mask if size else 0
            keys = prompt.keys(size)
            if not size and keys and keys[0] in self.approximate.unread:
                self.approximate.read(keys[0])
            ahead = partial(prompt.keys, size) if size else None
            matches = by_size[size] = index.match(keys, mask, usable, ahead, readers)
            if matches.gpu or matches.below:
                tokens = size or prompt.approximate_block_tokens
                for slot, blocks in matches.gpu.items():
                    matched[slot] = blocks * tokens
                for source, level in matches.below:
                    below.setdefault(source, {}).update({slot: blocks * tokens for slot, blocks in level.items()})
                if matches.sure is not matches.gpu:
                    for slot, blocks in matches.gpu.items():
                        awaited[slot] = (blocks - matches.sure.get(slot, 0)) * tokens
                if readers:
                    for slot, blocks in matches.readable.items():
                        if readers >> slot & 1 and slot not in self.doubted:
                            readable[slot] = blocks * tokens
        for slot, trust in self.doubted.items():
            for claim in (matched, awaited, *below.values()):
                if slot in claim:
                    claim[slot] *= trust
        self._questions += counts
        question = Question(
            tokens=prompt.tokens,
            matched=matched,
            below=below or NOTHING_BELOW,
            session=session,
            within=within,
            model=model,
            tried=tried,
            exact=prompt.exact,
            turn=self._questions,
            now_s=now_s,
            came_s=came_s,
            awaited=awaited or NOTHING,
            readable=readable or NOTHING,
            half=half,
            tenant=tenant,
            further_tokens=further_tokens,
        )
        return question, by_size

    def decide(
        self, question: Question, candidates: Sequence[Candidate], ring: Ring | None = None, *, policy: str = ""
    ) -> Decision:
        """Choose a replica. `ring`: of the candidates, for the policy `session`."""
        if (tenant := question.tenant) is not None:
            self.shares.routers = self.turns.peers + 1
            question.behind_s = question.lead_s = self.shares.behind_s(tenant, candidates, question.now_s)
            question.stands_back = question.behind_s > 0
            question.is_cold = question.stands_back and self.shares.is_cold(tenant, question.now_s)
            question.weight = self.shares.weight(tenant.model, question.now_s)
            if (service := tenant.service) is not None:
                # It is not overtaken for ever: from twice its objective on, it goes before all that come.
                question.behind_s = min(question.behind_s, service.first_token_s) + service.first_token_s
                question.stands_back |= self.objectives.yields(tenant.model, service, question.now_s)
        policy = policy or self.policy
        decision = choose(policy, question, candidates, self._rng, ring)
        if decision.rejection == "unavailable" and question.half == "decode":
            question.anyway = True  # to generate, rather a replica that is believed to be down than none
            decision = choose(policy, question, candidates, self._rng, ring)
        working_set = self.working_sets.get(question.model)
        if working_set is not None and decision.chosen is not None and not working_set.may_begin(question):
            decision.chosen, decision.rejection = None, "held"
        return decision

    def outlook(self, decision: Decision, room_s: float = 0.0) -> Outlook | None:
        """Foresee when the first token of a new prompt comes, and refuse it if its class demands that.

        `room_s`: the time until there is room, if there is none now. None: it has no class, or nothing is known.
        """
        question = decision.question
        if (tenant := question.tenant) is None or tenant.service is None or not decision.candidates:
            return None
        if not any(candidate.prefill_tokens_per_s for candidate in decision.candidates):
            return None  # while no speed is known, nobody is known to be late
        first_s, own_s = decision.soonest()
        wait_s = room_s if decision.chosen is None else first_s - own_s
        return self.objectives.outlook(tenant.model, tenant.service, wait_s, own_s, question.now_s, question.lead_s)

    def came(self, tenant: Tenant | None, outlook: Outlook | None, first_token_s: float) -> None:
        """Note how long the first token of a prompt took, to foresee others."""
        if outlook is not None and tenant is not None and tenant.service is not None:
            self.objectives.came(tenant.model, tenant.service, outlook.first_token_s, first_token_s)

    # ---- a request at a replica

    def sent(
        self,
        decision: Decision,
        load: ReplicaLoad,
        prompt: Prompt,
        block_size: int,
        now_s: float,
        *,
        streams: bool = True,
        ranked: bool = False,
    ) -> Placed:
        """Count a request as sent to this replica now: its tokens as queued there, its blocks as cached.

        `block_size`: of the replica's events. `ranked`: the replica computes prompts in the order of our priorities.
        """
        question, slot, fetched_tokens, turn = decision.question, load.candidate.slot, 0, None
        if question.is_fetched and load.candidate.role is not None:
            fetched_tokens = max(1, question.tokens - int(question.matched.get(slot, 0)))
        if not prompt.exact or block_size == APPROXIMATE:
            block_size, keys, wait_s = APPROXIMATE, prompt.keys(APPROXIMATE), 0.0
        else:
            keys = prompt.keys(block_size, self.index.lookahead(slot))
            wait_s = self._optimistic_ttl_s + QUEUE_MARGIN * min(decision.ttft_s, self._first_token_timeout_s)
        known, tokens = 0, 1 if fetched_tokens else ceil(decision.uncached_tokens)
        priority_s = decision.priority_s(now_s) if ranked else None
        placed = Placed(load, now_s, tokens, streams, priority_s, fetched_tokens=fetched_tokens)
        placed.stands_back, placed.is_batch = question.stands_back, question.further_tokens > 0
        self.sent_as(placed, keys, wait_s)
        if block_size:
            known = self._used(placed, block_size, keys, is_cold=question.is_cold)
            if placed.pages and question.model and self._holds:
                party, name = "" if question.tenant is None else question.tenant.name, name_of(question)
                bound = working_set.bound if (working_set := self.working_sets[question.model]).is_on else 0.0
                turn = PeerTurn(question.model, party, name if question.session else "", question.tokens, bound)
                placed.turn = self._turn(placed, turn, known * page_tokens(block_size))
        elif keys:
            self.approximate.routed(slot, keys)
        if question.tenant is not None:
            placed.tenant = question.tenant
            self.shares.asked(question.tenant, tokens, now_s)
            self.shares.found(question.tenant, len(placed.pages), known)
        if self.outbox is not None:
            came_s = question.now_s if question.came_s is None else question.came_s
            if self.outbox.gathers:
                self.turns.sent(came_s, tokens, now_s)
            self.outbox.sent(
                PeerRequest(
                    id=placed.id,
                    replica=load.candidate.name,
                    uncached_tokens=tokens,
                    streams=streams and not placed.is_batch,
                    priority_s=priority_s,
                    block_size=block_size,
                    keys=array("Q", keys).tobytes(),
                    awaited_s=placed.awaited_s,
                    fetched_tokens=fetched_tokens,
                    age_s=now_s - came_s,
                    turn=turn,
                    is_cold=question.is_cold,
                ),
                now_s,
            )
        return placed

    def sent_by_peer(self, load: ReplicaLoad, request: PeerRequest, now_s: float) -> Placed:
        """Count a request that another router has sent to this replica."""
        tokens, fetched_tokens = request.uncached_tokens, request.fetched_tokens
        placed = Placed(load, now_s, tokens, request.streams, request.priority_s, fetched_tokens=fetched_tokens)
        placed.is_ours = False
        if request.block_size == APPROXIMATE:
            self.sent_as(placed, [], request.awaited_s)
            self.approximate.heard(load.candidate.slot, request.keys)
        else:
            keys = array("Q", request.keys).tolist()
            self.sent_as(placed, keys, request.awaited_s)
            self._used(placed, request.block_size, keys, is_cold=request.is_cold)
            turn, known = request.turn, self.working_sets
            if placed.pages and turn is not None and self._holds and (turn.model in known or len(known) < MAX_MODELS):
                known[turn.model].heard(turn.bound)
                placed.turn = self._turn(placed, turn, 0.0)
        return placed

    def _turn(self, placed: Placed, turn: PeerTurn, known_tokens: float) -> Turn:
        working_set, replica = self.working_sets[turn.model], placed.load.candidate.name
        return working_set.turn(turn, placed.pages, known_tokens, replica, placed.sent_s)

    def _used(self, placed: Placed, block_size: int, keys: list[int], *, is_cold: bool = False) -> int:
        """Note that a prompt's blocks are used there now; return how many of its pages were used before.

        `is_cold`: they take no room from others, and say nothing about how others come again.
        """
        known = 0
        if keys and self.policy == "cost":
            placed.pages = pages_of(keys, block_size)
            known = self.reuse.used(placed.pages, placed.sent_s, counts=not is_cold)
            if (ages := placed.load.candidate.ages) is not None and not is_cold:
                ages.routed(placed.pages, placed.sent_s)
        return known

    def sent_as(self, placed: Placed, keys: list[int], wait_s: float) -> Placed:
        """Count a request with these figures; its blocks count as cached for `wait_s` without an event."""
        placed.id, load, now_s = next(self._ids), placed.load, placed.sent_s
        load.sent(
            placed.id,
            placed.uncached_tokens,
            now_s,
            # Neither the time of a transfer nor that of the first of several prompts says how fast prefill is.
            streamed=placed.streams and not placed.fetched_tokens and not placed.is_batch,
            priority_s=placed.priority_s,
            stands_back=placed.stands_back,
            is_ours=placed.is_ours,
        )
        if wait_s and self._optimistic:
            placed.awaited_s = wait_s
            placed.awaited = keys, self.index.optimistic.add(load.candidate.slot, keys, now_s + wait_s)
        return placed

    def begun(self, placed: Placed, now_s: float) -> None:
        """Note a request's first byte, or the head of a good answer: its blocks will be stored."""
        matters = placed.streams or placed.awaited is not None
        placed.has_begun = True
        placed.awaited = None
        if placed.streams and not placed.is_batch:
            placed.load.begun(placed.id, now_s)
        if placed.is_ours and matters and self.outbox is not None:
            self.outbox.begun(placed.id, now_s)

    def used(self, placed: Sequence[Placed], computed: int, generated: int, now_s: float) -> None:
        """Count the tokens that a request's attempts have used in the end, beyond those that they were to compute."""
        if (tenant := placed[-1].tenant) is not None:
            begun = [one.uncached_tokens for one in placed if one.has_begun]
            unforeseen = max(0, computed - sum(begun)) if begun else 0
            self.shares.used(tenant, unforeseen, generated)
        if (turn := placed[-1].turn) is not None and placed[-1].has_begun:
            turn.working_set.computed(turn, computed, placed[-1].uncached_tokens, now_s)

    def fetched(self, placed: Placed, now_s: float) -> None:
        """Note the first token of a request whose KV came from another replica."""
        self.transfers.fetched(placed.fetched_tokens, now_s - placed.sent_s, now_s)

    def ended(self, placed: Placed, now_s: float) -> None:
        """Remove a request, however it ended; one that never began stores nothing."""
        if placed.tenant is not None and not placed.has_begun:
            self.shares.spared(placed.tenant, placed.uncached_tokens)
        placed.load.ended(placed.id, now_s)
        if placed.turn is not None:
            placed.turn.ended(now_s)
        if placed.awaited is not None:
            candidate = placed.load.candidate
            self.index.optimistic.withdraw(candidate.slot, *placed.awaited)
            if candidate.ages is not None:
                candidate.ages.forget(placed.pages)
            placed.awaited = None
        if placed.is_ours and self.outbox is not None:
            self.outbox.ended(placed.id, now_s)

    def expire(self, now_s: float) -> None:
        if self.hear is not None:
            self.hear()
        self.index.optimistic.expire(now_s)
