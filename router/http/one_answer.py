"""The answer of the whole router, whichever worker is asked: of all workers' answers one is made."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.endpoints import USUAL_DECISIONS, limit_of
from router.responses import ReplicaList
from router.workers.colleagues import ANSWER_S, CHANGE_S, REQUEST, Answer, Asked, Colleagues

log = logging.getLogger(__name__)

Merge: TypeAlias = Callable[[bytes, Mapping[int, bytes]], bytes]  # (query, answers by worker, its own first)


_FAMILY = re.compile(rb"^# HELP ", re.MULTILINE)


def metrics_of_all(_: bytes, texts: Mapping[int, bytes]) -> bytes:
    """The metrics of numbered workers as one text, in which each line has its worker's number.

    Sums would fall when a worker ends, and what is computed from counters would take that for a restart of all.
    """
    heads: dict[bytes, bytes] = {}
    lines: dict[bytes, list[bytes]] = {}
    for number, text in sorted(texts.items()):
        for family in _FAMILY.split(text)[1:]:
            help_line, type_line, *rows = family.rstrip(b"\n").split(b"\n")
            name = help_line.split(b" ", 1)[0]
            heads.setdefault(name, b"# HELP " + help_line + b"\n" + type_line + b"\n")
            for row in rows:
                metric, brace, rest = row.partition(b"{")
                if brace:
                    lines.setdefault(name, []).append(b'%b{worker="%d",%b\n' % (metric, number, rest))
                else:
                    metric, _, value = row.partition(b" ")
                    lines.setdefault(name, []).append(b'%b{worker="%d"} %b\n' % (metric, number, value))
    return b"".join(heads[name] + b"".join(lines.get(name, ())) for name in heads)


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
                **{name: sum(getattr(each.served, name) for each in same) for name in one.served.__struct_fields__}
            ),
            faults=sum(each.faults for each in same),
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


MERGED: Mapping[tuple[str, str], Merge] = {
    ("GET", "/metrics"): metrics_of_all,
    ("GET", "/replicas"): _replicas,
    ("GET", "/decisions"): _decisions,
}
FIRST = {("GET", "/decisions/{request_id:path}")}  # the answer of the worker that knows it
REPEATED = {  # once it has succeeded here
    ("POST", "/replicas"),
    ("DELETE", "/replicas/{name}"),
    ("POST", "/replicas/{name}/drain"),
    ("POST", "/replicas/{name}/undrain"),
    ("POST", "/replicas/{name}/resync"),
}


async def one_answer(app: ASGIApp, colleagues: Colleagues, scope: Scope, receive: Receive, send: Send) -> None:
    """Have the app answer for all workers where the route asks for that; the caller has admitted the request."""
    route = scope["method"], scope["state"]["asked"].route.template
    body, merge = bytearray(), MERGED.get(route)
    if route not in REPEATED and merge is None and route not in FIRST:
        await app(scope, receive, send)
        return

    async def read() -> Message:
        message = await receive()
        body.extend(message.get("body", b""))
        return message

    async def ask_others() -> dict[int, Answer]:
        sees_all = scope["state"]["admitted"].admin
        asked = Asked(scope["method"], scope["raw_path"], scope["query_string"], bytes(body), sees_all)
        return await colleagues.told(REQUEST, asked, ANSWER_S if asked.method == "GET" else CHANGE_S)

    if merge is not None:
        own, others = await asyncio.gather(answer_of(app, scope, receive), ask_others())
        if is_success(own):
            bodies = {number: one.body for number, one in others.items() if is_success(one)}
            own.body = merge(scope["query_string"], {colleagues.place.number: own.body, **bodies})
    else:
        own = await answer_of(app, scope, read)
        if route in FIRST and not is_success(own):
            own = next(filter(is_success, (await ask_others()).values()), own)
        elif route in REPEATED and is_success(own):
            for number, one in (await ask_others()).items():
                if not is_success(one):
                    what = f"{scope['method']} {scope['path']}"
                    log.warning("worker %d refuses %s: %s", number, what, one.body.decode(errors="replace"))
    headers = [(name, value) for name, value in own.headers if name != b"content-length"]
    headers.append((b"content-length", b"%d" % len(own.body)))
    await send({"type": "http.response.start", "status": own.status, "headers": headers})
    await send({"type": "http.response.body", "body": own.body})


def is_success(answer: Answer) -> bool:
    return 200 <= answer.status < 300


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


def scope_with(method: str, path: str, raw_path: bytes, **more: Any) -> Scope:
    """A request as ASGI describes it."""
    of_server = {"type": "http", "asgi": {"version": "3.0"}, "root_path": "", "server": None, "state": {}}
    return {**of_server, "http_version": "1.1", "scheme": "http", "query_string": b"", "client": None} | {
        "method": method,
        "path": path,
        "raw_path": raw_path,
        **more,
    }
