"""Routers side by side over the same simulated first-come-first-served replicas, in virtual time."""

import heapq
import random
from collections.abc import Callable

from events.native import Load
from router.placement.load import ReplicaLoad
from router.placement.policy import Candidate, Question, choose

RATE = 8000.0
REPORT_S = 0.25
DELAY_S = 0.002  # of a report on its way
BEFORE, BEFORE_S = 250, 10.0  # prompts of 1,000 tokens before the burst: 0.8 of what four servers can do


class Server:
    """Prefills one prompt after the other."""

    def __init__(self) -> None:
        self.done_s = float("-inf")
        self.tokens = 0
        self.requests = 0  # not done yet

    def take(self, tokens: int, now_s: float) -> float:
        self.done_s = max(self.done_s, now_s) + tokens / RATE
        self.tokens += tokens
        self.requests += 1
        return self.done_s

    def queued_tokens(self, now_s: float) -> int:
        return round(max(0.0, self.done_s - now_s) * RATE)


class Router:
    def __init__(self, servers: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.candidates = [Candidate(f"r{slot}", slot, prefill_tokens_per_s=RATE) for slot in range(servers)]
        self.loads = [ReplicaLoad(candidate) for candidate in self.candidates]

    def place(self, request_id: int, tokens: int, now_s: float) -> int:
        chosen = choose("cost", Question(tokens, {}), self.candidates, self.rng).chosen
        assert chosen is not None
        self.loads[chosen.slot].sent(request_id, tokens, now_s)
        return chosen.slot


class World:
    """Some traffic, and then a burst of prompts; each comes to a router at random."""

    def __init__(self, routers: int, servers: int, seed: int, *, reports: bool = True) -> None:
        self.servers = [Server() for _ in range(servers)]
        self.routers = [Router(servers, seed + number) for number in range(routers)]
        self.rng = random.Random(seed)
        self.reports = reports
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0

    def at(self, at_s: float, what: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, what))

    def run(self, prompts: list[int], over_s: float, elsewhere_tokens: int = 0) -> float:
        """Imbalance: the most tokens that a server got since the burst began, as a multiple of the mean.

        The first server gets `elsewhere_tokens` half a second before, from somebody who asks no router.
        """
        for number in range(BEFORE):
            self.at(BEFORE_S * (number / BEFORE - 1), self._arrival(-1 - number, 1000))
        for number, tokens in enumerate(prompts):
            self.at(self.rng.uniform(0, over_s), self._arrival(number, tokens))
        if self.reports:
            for slot in range(len(self.servers)):
                self.at(-BEFORE_S - REPORT_S * self.rng.random(), self._report(slot, over_s))
        self._play(-0.5)
        before = [server.tokens for server in self.servers]
        if elsewhere_tokens:
            self.servers[0].take(elsewhere_tokens, -0.5)
            self.servers[0].requests -= 1
        self._play(float("inf"))
        tokens_of = [server.tokens - had for server, had in zip(self.servers, before, strict=True)]
        return max(tokens_of) * len(tokens_of) / sum(tokens_of)

    def _play(self, until_s: float) -> None:
        while self._events and self._events[0][0] < until_s:
            at_s, _, what = heapq.heappop(self._events)
            what(at_s)

    def _arrival(self, number: int, tokens: int) -> Callable[[float], None]:
        def arrives(now_s: float) -> None:
            router = self.rng.choice(self.routers)
            slot = router.place(number, tokens, now_s)
            server = self.servers[slot]

            def is_done(at_s: float) -> None:
                server.requests -= 1
                router.loads[slot].begun(number, at_s)
                router.loads[slot].ended(number, at_s)

            self.at(server.take(tokens, now_s), is_done)

        return arrives

    def _report(self, slot: int, until_s: float) -> Callable[[float], None]:
        def reports(now_s: float) -> None:
            server = self.servers[slot]
            queued_tokens = server.queued_tokens(now_s)
            load = Load(min(server.requests, 1), max(0, server.requests - 1), queued_tokens, prefill_tokens_per_s=RATE)
            for router in self.routers:
                self.at(now_s + DELAY_S, lambda at_s, heard=router.loads[slot]: heard.reported(load, at_s))  # type: ignore[misc]
            if now_s < until_s:
                self.at(now_s + REPORT_S, reports)

        return reports
