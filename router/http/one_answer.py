"""The answer of the whole router, whichever worker is asked: of all workers' answers one is made."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.endpoints import USUAL_DECISIONS, limit_of
from router.responses import ReplicaList, RetainedAt, RetainedList
from router.workers.colleagues import Answer, Asked, Colleagues
from router.workers.metrics import metrics_of_all

log = logging.getLogger(__name__)

Merge: TypeAlias = Callable[[bytes, Mapping[int, bytes]], bytes]  # of a query's answers by worker, the own one first


def _replicas(_: bytes, answers: Mapping[int, bytes]) -> bytes:
    """As the own worker knows them; what each worker has sent them is added up."""
    own, *others = (msgspec.json.decode(body, type=ReplicaList).replicas for body in answers.values())
    known = [{one.name: one for one in replicas} for replicas in others]
    for i, one in enumerate(own):
        same = [one, *(replicas[one.name] for replicas in known if one.name in replicas)]
        own[i] = msgspec.structs.replace(
            one,
            load=msgspec.structs.replace(one.load, in_flight=sum(each.load.in_flight for each in same)),
            served=type(one.served)(
                *(sum(getattr(each.served, name) for each in same) for name in one.served.__struct_fields__)
            ),
            idle=one.idle if all(each.idle is not None for each in same) else None,
        )
    return msgspec.json.encode(ReplicaList(own))


def _decisions(query: bytes, answers: Mapping[int, bytes]) -> bytes:
    """The newest of all."""
    found: list[dict[str, Any]] = []
    for body in answers.values():
        found += msgspec.json.decode(body)["decisions"]
    found.sort(key=itemgetter("ts"), reverse=True)
    return msgspec.json.encode({"decisions": found[: limit_of(QueryParams(query), USUAL_DECISIONS)]})


def _retained(_: bytes, answers: Mapping[int, bytes]) -> bytes:
    """Each prefix once, at every replica for the longest time that a worker knows of."""
    whole: dict[str, Any] = {}
    for body in answers.values():
        for prefix in msgspec.json.decode(body, type=RetainedList).retained:
            before = whole.setdefault(prefix.id, prefix)
            at: dict[str, RetainedAt] = {one.name: one for one in before.replicas}
            for one in prefix.replicas:
                at[one.name] = max(one, at.get(one.name, one), key=attrgetter("left_s"))
            before.replicas = list(at.values())
    return msgspec.json.encode(RetainedList(list(whole.values())))


MERGED: Mapping[tuple[str, str], Merge] = {
    ("GET", "/metrics"): lambda _, answers: metrics_of_all(answers),
    ("GET", "/replicas"): _replicas,
    ("GET", "/decisions"): _decisions,
    ("GET", "/retain"): _retained,
}
FIRST = {("GET", "/decisions/{request_id:path}")}  # the answer of the worker that knows it
REPEATED = {  # once it has succeeded here
    ("POST", "/replicas"),
    ("DELETE", "/replicas/{name}"),
    ("POST", "/replicas/{name}/drain"),
    ("POST", "/replicas/{name}/undrain"),
    ("POST", "/replicas/{name}/resync"),
    ("POST", "/retain"),
    ("DELETE", "/retain/{id}"),
}


class OneAnswer:
    """Stands before the app of a router with several workers."""

    def __init__(self, app: ASGIApp, colleagues: Colleagues) -> None:
        self._app = app
        self._colleagues = colleagues

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer for all workers where the route asks for that; its caller has admitted the request."""
        route = scope["method"], scope["state"]["asked"].route.template
        if route in REPEATED:
            answer = await self._repeated(scope, receive)
        elif (merge := MERGED.get(route)) is not None:
            answer = await self._merged(scope, receive, merge)
        elif route in FIRST:
            answer = await self._first(scope, receive)
        else:
            await self._app(scope, receive, send)
            return
        headers = [(name, value) for name, value in answer.headers if name != b"content-length"]
        headers.append((b"content-length", b"%d" % len(answer.body)))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _merged(self, scope: Scope, receive: Receive, merge: Merge) -> Answer:
        own, others = await asyncio.gather(answer_of(self._app, scope, receive), self._colleagues.ask(_asked(scope)))
        if not is_success(own):
            return own
        bodies = {number: one.body for number, one in others.items() if is_success(one)}
        own.body = merge(scope["query_string"], {self._colleagues.place.number: own.body, **bodies})
        return own

    async def _first(self, scope: Scope, receive: Receive) -> Answer:
        own = await answer_of(self._app, scope, receive)
        if is_success(own):
            return own
        others = await self._colleagues.ask(_asked(scope))
        return next(filter(is_success, others.values()), own)

    async def _repeated(self, scope: Scope, receive: Receive) -> Answer:
        body = bytearray()

        async def read() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        own = await answer_of(self._app, scope, read)
        if is_success(own):
            for number, one in (await self._colleagues.ask(_asked(scope, bytes(body)))).items():
                if not is_success(one):
                    what = f"{scope['method']} {scope['path']}"
                    log.warning("worker %d refuses %s: %s", number, what, one.body.decode(errors="replace"))
        return own


def is_success(answer: Answer) -> bool:
    return 200 <= answer.status < 300


def _asked(scope: Scope, body: bytes = b"") -> Asked:
    headers = [(name, value) for name, value in scope["headers"] if name == b"content-encoding"]
    sees_all = scope["state"]["admitted"].admin
    return Asked(scope["method"], scope["raw_path"], scope["query_string"], headers, body, sees_all)


async def answer_of(app: ASGIApp, scope: Scope, receive: Receive) -> Answer:
    """The app's whole answer."""
    answer = Answer(0, [], b"")
    body = bytearray()

    async def take(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], list(message["headers"])
        body.extend(message.get("body", b""))

    await app(scope, receive, take)
    answer.body = bytes(body)
    return answer
