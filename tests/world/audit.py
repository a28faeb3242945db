"""The promises of a world: those that hold while it lasts, and those that hold when all is over."""

import json
from collections import Counter
from collections.abc import Sequence

from api.openai.requests import ChatRequest, read
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import load_tokenizer
from events.blocks import pack_tokens
from router.process.front import Front
from router.proxy.retries import MAX_LOST
from router.records.access_log import Line
from tests.router.scripted import Served, chat
from tests.world.client import LEFT, Asked, without_own
from tests.world.replica import ScriptedReplica, stream_of, tokens_of

# Where each replica has refused a request or was lost with it, its client hears of the last refusal.
LAST_REFUSALS = ["refused with 429 queue_full"], ["refused with 503 draining"]
WAITS_S = 45.0  # at most, from one byte to the next: for room, and for three replicas that say nothing


class Audit:
    """Collects what does not hold; a seed has failed if anything is there at the end."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.asked: list[Asked] = []
        self._prompts = Prompts(load_tokenizer(None), None)
        self._answered: Counter[str] = Counter()  # requests, by id

    def answered(self, line: Line) -> None:
        self._answered[line.request_id] += 1

    def undrained(self, requests: int) -> None:
        if requests:
            self.failures.append(f"{requests} requests are open after the router's drain")

    def clients(self, asked: list[Asked], replicas: Sequence[ScriptedReplica]) -> None:
        """Each request has ended once, for client and router, within the limits, and with the bytes that it should.

        A client may be told that a replica was full, and that its request has lost as many of them as it may.
        """
        self.asked = asked
        refused = set[str]().union(*(replica.refused for replica in replicas))
        unfinished = sum((replica.unfinished for replica in replicas), Counter[str]())
        for one in asked:
            if one.ends == [LEFT] and not self._answered[one.id]:
                continue  # the router may never have heard of it
            if len(one.ends) != 1 or self._answered[one.id] != 1:
                times = self._answered[one.id]
                self.failures.append(f"{one.id} ended {one.ends} for its client, and {times} times for the router")
            if one.longest_wait_s > WAITS_S:
                self.failures.append(f"{one.id}: nothing came for {one.longest_wait_s:.1f} s")
            if one.ends == [LEFT] or (one.id in refused and one.ends in LAST_REFUSALS):
                continue
            if one.ends == ["broken off"] and unfinished[one.id] >= MAX_LOST:
                continue
            if one.is_wrong:
                if one.ends != ["refused with 400 None"]:
                    self.failures.append(f"{one.id}: {one.ends}, though its body is no JSON")
                continue
            if one.ends != ["whole"]:
                self.failures.append(f"{one.id}: {one.ends}, though a replica was always well")
            elif one.answer != self._undisturbed(one):
                self.failures.append(f"{one.id}: other bytes than of an undisturbed replica")

    def _undisturbed(self, asked: Asked) -> bytes:
        raw = json.dumps(chat(asked.text, max_tokens=asked.max_tokens)).encode()
        tokens = tokens_of(pack_tokens(self._prompts.chat(read(raw, ChatRequest))), asked.max_tokens)
        return without_own(b"".join(stream_of(tokens, 0, "", 0)))

    async def router(self, front: Front, replicas: Sequence[ScriptedReplica]) -> None:
        """Nothing is left of any request, every structure is sound, and the index has what the replicas have."""
        placement, router = front.router.placement, front.router
        try:
            await Served(front, 0, {}).idle()
            for replica in replicas:
                known = router.feeds.known(replica.name)
                assert known is not None and known[1] is None, f"{replica.name} is not exact: {known}"
                slot, blocks = router.members.by_name[replica.name].slot, [*replica.cache.blocks]
                held = placement.index.blocks(slot)
                assert sum(held.values()) == len(blocks), f"{replica.name} has {len(blocks)} blocks, not {held}"
                assert all(mask >> slot & 1 for mask in placement.index.holders(blocks)), f"{replica.name} has others"
            for checked in (placement.index, placement.guesses, router.waiting, router.admission):
                checked.check()
        except (AssertionError, TimeoutError) as error:
            self.failures.append(f"the router is not at rest: {error!r}")
