"""Assembles the router's parts, and serves a socket from start to drain."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from api.http.connection import Connections, Limits
from api.http.routes import Route, RouteTable
from api.http.server import HttpServer, connection_limits, tls_context
from api.process.tasks import check, end, first
from events.sockets.curve import shared_keys
from router.config import RouterConfig
from router.core import Router
from router.dashboard.dashboard import decided
from router.dashboard.sampling import unserved_by
from router.http.app import answered, build_app, dashboard_of
from router.http.at_replicas import expect_clear
from router.http.front import FrontConnection, Openings
from router.http.one_answer import answer_of
from router.http.routes import FORWARDED, ROUTES, named
from router.members.broken import Broken
from router.members.counts import counts_of
from router.members.discovery.desired import CombinedDiscovery, Discovery, StaticReplicas
from router.members.discovery.kubernetes import KubernetesWatch, PoolDiscovery
from router.members.discovery.pods import pods_of
from router.members.discovery.registry import RegistryDiscovery
from router.members.feed import Feeds
from router.members.members import Members
from router.members.spec import Desired, parse_replicas
from router.members.watched_file import LastGood
from router.monitor.learning import Learning
from router.monitor.upkeep import Upkeep
from router.placement.load import ReplicaLoad
from router.placement.placement import Placement
from router.prompts.model_rewrites import Rules, parse_rewrites
from router.prompts.tokenizers import Tokenizers
from router.records.line_file import LineFile
from router.records.request_log import RequestLog
from router.tenants.admission import Admission
from router.tenants.keys import Key, parse_keys
from router.tenants.usage import Selection
from router.workers import questions
from router.workers.colleagues import REQUEST, Asked, Colleagues, Told, about
from router.workers.peer_links import Links, PeerSockets
from router.workers.processes import Place

if TYPE_CHECKING:
    from router.http.picker.server import PickerServer

log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.05
READY_LOOK_S = 0.2
READY_WITHIN_S = 10.0  # before a worker takes a part of the connections, while others serve


class Front:
    """`start` it within a running loop, `drain` it when its work should end, then `close` it."""

    def __init__(self, config: RouterConfig, listener: socket.socket, place: Place | None = None, **given: Any) -> None:
        """`place`: if this is one of several workers. `given`: sockets to peers; a clock and a seed for `assembled`."""
        sockets = given.pop("sockets", PeerSockets)
        self.config = config
        self.listener = listener
        self._watched_keys = watched_keys(config.api_keys_file, config.keys) if config.api_keys_file else None
        keys = (self._watched_keys and self._watched_keys.look()) or config.keys
        admission = Admission(keys, demand_key=config.demand_key, shared=place and place.usage)
        self.router, self.upkeep = assembled(config, admission, **given)
        self._watched_rewrites: LastGood[Rules] | None = None
        if config.model_rewrites_file is not None:
            self._watched_rewrites = LastGood(config.model_rewrites_file, parse_rewrites, "rewrites")
            self._use_rewrites(self._watched_rewrites.look())
        self.links: Links | None = None
        if config.peer_listen is not None or place is not None:
            peer_keys = None if config.peer_keys is None else shared_keys(config.peer_keys)

            def load_of(name: str) -> ReplicaLoad | None:
                member = self.router.members.by_name.get(name)
                return None if member is None else member.load

            to_peers = config.peer_listen, config.peers, peer_keys, sockets
            self.links = Links(self.router.placement, load_of, self.router.room, *to_peers, place)
        self.colleagues = None if place is None else Colleagues(place)
        self.discovery = CombinedDiscovery(discoveries(config))
        self._taken_over: Desired = {}
        if config.access_log is not None:
            self.router.history.access_log = LineFile(config.access_log, "access log")
        if config.request_log is not None:
            self.router.history.request_log = RequestLog(config.request_log, bodies=config.log_prompts)
        if config.otlp_endpoint is not None:
            from router.records.tracing import tracing_to  # this needs an extra

            self.router.tracing = tracing_to(config.otlp_endpoint, None if place is None else place.number)
        self.dashboard = dashboard_of(self.router, self.colleagues)
        more = named(config.client_paths)
        table = RouteTable((*ROUTES, *more))
        self._app = build_app(self.router, self.upkeep, table, self.dashboard, self.colleagues, self.links)
        self._limits = limits = connection_limits(config.max_connections)
        openings = Openings(self.router, (*FORWARDED, *more))

        def connect(connections: Connections) -> FrontConnection:
            return FrontConnection(connections, self._limits, self._app, table, openings)

        tls = None if config.tls_cert is None else tls_context(config.tls_cert, config.tls_key)
        self.server = HttpServer(connect, tls)
        self.picker: PickerServer | None = None
        if config.picker_listen is not None:
            self.picker = self._picker(config.picker_listen, limits, table, (*FORWARDED, *more))
        self._workers = 1
        if place is not None:
            self.divide(max(place.serving[0], place.number + 1))
        self.tasks: list[asyncio.Task[None]] = []
        self._serving: asyncio.Task[None] | None = None  # one of them

    def _picker(self, listen: str, limits: Limits, table: RouteTable, forwarded: tuple[Route, ...]) -> "PickerServer":
        """Raise OSError if it cannot listen there."""
        from router.http.picker.exchange import ByGateway
        from router.http.picker.gateway import Gateway
        from router.http.picker.server import PickerServer  # this needs an extra

        openings = Openings(self.router, forwarded, ByGateway(self.router.members))
        gateway = Gateway(table, openings, partial(answer_of, self._app), limits)
        life = self.router.lifecycle
        return PickerServer(self.config, lambda: not life.leaving and life.not_ready() is None, gateway, listen)

    async def start(self) -> None:
        """Start all tasks, and return once the router listens, which may be before it is ready."""
        self.tasks = [
            asyncio.create_task(self.discovery.run(self._apply)),
            asyncio.create_task(self.upkeep.tick()),
            asyncio.create_task(self.dashboard.statuses.sampling.run()),
        ]
        if self._watched_keys is not None:
            self.tasks.append(asyncio.create_task(self._watched_keys.run(self.router.admission.use)))
        if self._watched_rewrites is not None:
            self.tasks.append(asyncio.create_task(self._watched_rewrites.run(self._use_rewrites)))
        await self.router.ledger.save()  # this reads the day's use before this start
        self.tasks.append(asyncio.create_task(self.router.ledger.run()))
        if self.links is not None:
            self.tasks.append(asyncio.create_task(self.links.run()))
        if self.colleagues is not None:
            self.tasks.append(asyncio.create_task(self.colleagues.serve(self._tell)))
            if self.colleagues.place.joins:
                await self._take_place(self.colleagues)
        if self.picker is not None:
            await self.picker.start()
        self._serving = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        self.tasks.append(self._serving)
        listening = asyncio.create_task(self.server.listening.wait())
        await first(listening, beside=self.tasks)
        self.check()

    async def _take_place(self, colleagues: Colleagues) -> None:
        """Take over what colleagues know; while they serve, wait until this worker would answer as they do."""
        told = (await colleagues.told(questions.CHANGES)).values()
        for changes in told:
            self._taken_over |= changes.found
            self.upkeep.catch_up(changes.added, changes.draining)
        self._apply(self.discovery.desired())
        late_s, said = self.router.now_s() + READY_WITHIN_S, False
        while any(changes.serves for changes in told):
            late = self.router.now_s() > late_s
            if not self._lacks_rules and (late or self.router.lifecycle.not_ready() is None):
                break
            if late and not said:
                said = True
                log.warning("other workers serve until this one can read the keys and model rewrites")
            self.check()
            await asyncio.sleep(READY_LOOK_S)
            told = (await colleagues.told(questions.CHANGES)).values()

    def _apply(self, found: Desired) -> None:
        """Use these replicas; those of colleagues, too, until every source has named its own."""
        if self.discovery.complete:
            self._taken_over = {}
        # One that a source here has named is that source's to remove.
        self._taken_over = {name: spec for name, spec in self._taken_over.items() if name not in found}
        self.upkeep.apply(self._taken_over | found)

    def check(self) -> None:
        """Raise the error that has ended a task, if there is one."""
        check(self.tasks)

    def divide(self, workers: int) -> None:
        """Be one of so many workers, which divide the limits; if there were fewer, others take some connections."""
        if workers <= self._workers:
            return
        self._workers, config = workers, self.config
        limits = connection_limits(config.max_connections)
        self._limits = replace(limits, connections=-(-limits.connections // workers))
        self.router.waiting.capacity = self.router.newcomers.capacity = -(-config.queue_size // workers)
        self.router.bodies.limit_bytes = max(config.max_body_bytes, config.max_bodies_bytes // workers)
        for connection in list(self.server.connections.open):  # clients connect again, and the kernel divides anew
            connection.retire(now=False)

    def leave(self) -> None:
        """Keep serving, but report not ready, and make each response the last of its connection."""
        self.router.lifecycle.leaving = True
        self.server.retire(now=False)

    async def drain(self, limit_s: float) -> int:
        """Stop taking requests after a delay, and let running ones end; return the number of those that did not."""
        if self.config.drain_delay_s:
            self.leave()
            await asyncio.sleep(self.config.drain_delay_s)
            self.server.retire(now=True)  # a request on an open connection would only be refused
        life = self.router.lifecycle
        life.leaving = life.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while life.open_requests or self.server.connections.are_unread():
                    await asyncio.sleep(DRAIN_LOOK_S)
        return life.open_requests

    async def close(self) -> None:
        self.server.end()
        self.dashboard.forget()
        if self.picker is not None:
            await self.picker.close()
        if self._serving is not None:
            await asyncio.wait([self._serving])
        await end(self.tasks)
        await self.upkeep.close()
        self.router.feeds.close()
        await self.router.reading.close()
        if self.links is not None:
            self.links.close()
        self.router.close()
        await self.router.ledger.close()
        if self.router.tracing is not None:
            self.router.tracing.close()
        for log_file in (self.router.history.access_log, self.router.history.request_log):
            if log_file is not None:
                log_file.close()

    def _use_rewrites(self, rules: Rules | None) -> None:
        if rules is not None:
            self.router.model_rewrites, self.router.lifecycle.awaits_rewrites = rules, False

    async def _tell(self, told: Told) -> Any:
        """Answer a colleague: what this worker alone knows of the whole router."""
        members, history = self.router.members, self.router.history
        match told.question:
            case REQUEST.name:
                return await answered(self._app, about(told, Asked))
            case questions.FIGURES.name:
                of_replicas = {
                    member.name: questions.OfReplica(member.candidate.in_flight, counts_of(member))
                    for member in members
                }
                return questions.Figures(of_replicas, len(self.router.waiting), unserved_by(history.counts))
            case questions.CHANGES.name:
                draining = [name for name, server in members.servers.items() if server.health.draining]
                serves = self._serving is not None and not self._lacks_rules
                return questions.Changes(serves, self.upkeep.wanted, self.upkeep.added, draining)
            case questions.NOT_READY.name:
                return self.router.lifecycle.not_ready() or ""
            case questions.RECENT.name:
                return history.recent.all()
            case questions.DECIDED.name:
                return decided(history.decisions)
            case questions.USAGE.name:
                await self.router.ledger.save()
                return await self.router.ledger.unsaved(about(told, Selection))
            case questions.LEARN_AGAIN.name:
                named = [members.servers[name] for name in about(told, list[str]) if name in members.servers]
                for error in await asyncio.gather(*map(self.upkeep.learn_again, named), return_exceptions=True):
                    if error is not None and not isinstance(error, Broken):  # health checks judge what is broken
                        raise error
                return True
            case questions.FORGET.name:
                members.forget(about(told, str))
                return True
            case questions.EXPECT_CLEAR.name:
                for server in members.servers.values():
                    expect_clear(server, self.router.placement)
                return True
        raise ValueError(f"another worker asks {told.question!r}, which this one does not know")

    @property
    def _lacks_rules(self) -> bool:
        """Tell whether colleagues may know more: what stood in a file before it broke, or what a cluster's API said."""
        lacks_keys = self._watched_keys is not None and not self._watched_keys.is_known
        return lacks_keys or self.router.lifecycle.awaits_rewrites


# ---- the router without its HTTP front


def watched_keys(path: str, beside: Sequence[Key] = ()) -> LastGood[list[Key]]:
    """The keys from a file and from options."""

    def parse(path: str, text: str) -> list[Key]:
        keys = parse_keys(path, text)
        names = {key.name for key in beside}
        if taken := next((key.name for key in keys if key.name in names), None):
            raise ValueError(f"{path}: the name {taken!r} is used by an option; choose another one")
        return [*beside, *keys]

    return LastGood(path, parse, "keys")


def assembled(
    config: RouterConfig, admission: Admission, clock: Callable[[], float] = time.monotonic, seed: int | None = None
) -> tuple[Router, Upkeep]:
    """Raise OSError or ValueError if a tokenizer or a template cannot be read. Call it within a running loop."""
    tokenizers = Tokenizers(config.model_dirs, config.chat_templates, config.message_cache_bytes)
    placement = Placement(
        config.policy, first_token_timeout_s=config.first_token_timeout_s, working_sets=config.hold_sessions, seed=seed
    )
    feeds = Feeds(placement.index, lambda name, status: upkeep.heard(name, status), clock)
    router = Router(config, Members(tokenizers.of, config.expected_models), feeds, placement, admission)
    upkeep = upkeep_of(router, tokenizers, seed)
    return router, upkeep


def upkeep_of(router: Router, tokenizers: Tokenizers, seed: int | None = None) -> Upkeep:
    """The upkeep of the router's replicas."""
    parts = router.config, router.members, router.feeds, router.placement, router.admission
    learning = Learning(*parts, tokenizers, router.now_s)
    router.verification, router.asking = learning.verification, learning.asking if router.config.ask_engines else None
    return Upkeep(learning, router, seed)


def discoveries(config: RouterConfig) -> list[Discovery]:
    found: list[Discovery] = [StaticReplicas(config.replicas)]
    if config.replicas_file is not None:
        found.append(LastGood(config.replicas_file, parse_replicas, "replicas"))
    if config.registry is not None:
        found.append(RegistryDiscovery(config.registry))
    if (kubernetes := config.kubernetes) is not None:
        cluster = kubernetes.cluster
        if kubernetes.pods is not None:
            found.append(KubernetesWatch(cluster, pods_of(cluster.namespace, kubernetes.pods)))
        if kubernetes.pool is not None:
            found.append(PoolDiscovery(cluster, kubernetes.pool))
    return found
