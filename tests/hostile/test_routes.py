"""Access to every route of router, replica and controller, by every kind of caller and every odd spelling."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from api.errors import ApiError
from api.http.path import parse_path, parse_target, raw_path
from api.http.routes import Role, Route, RouteMatch, RouteTable, guarded
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import ByteTokenizer
from fleet.control import app as controller_app
from fleet.control.controller import Controller, StateStore
from fleet.control.hosts import LocalHosts
from replica.http import app as replica_app
from router.dashboard.status import FOR_ADMINISTRATORS
from router.http import app as router_app
from router.http import routes as router_routes
from router.tenants.keys import Key, keys_from_options
from tests.docs.pages import ROOT
from tests.hostile import route_tables
from tests.replica.http.test_app import SILENT_ENGINE
from tests.replica.http.test_app import serving as replica_serving
from tests.replica.http.test_app import serving_app as serving
from tests.replica.serving import config
from tests.router.loopback import until
from tests.router.scripted import Client, Script, connect, says, served

KEY, ADMIN, OTHER = "client-key", "admin-key", "key-of-another-group"
LOCAL, FOREIGN = "localhost", "router.example"
TABLES = {"router": router_routes.TABLE, "replica": replica_app.TABLE, "controller": controller_app.TABLE}
VALUES = {"{name}": "nobody", "{model:path}": "m", "{request_id:path}": "r", "{response_id}": "r", "{id}": "kept"}
VALUES |= {"{path:path}": "index.html", "{rest:path}": "engines/reset", "{file}": "swagger-ui.css"}


def routes_of(table: RouteTable) -> list[tuple[str, str, Route]]:
    """Method and path of everything in a table, with a value for each parameter."""
    found = []
    for route in table.routes:
        path = route.template
        for name, value in VALUES.items():
            path = path.replace(name, value)
        assert "{" not in path, f"{path}: give the parameter a value above"
        found += [(method, path, route) for method in route.methods]
    return found


CALLERS: dict[str, dict[str, str]] = {
    "nobody": {},
    "a client": {"authorization": f"Bearer {KEY}"},
    "a client of another group": {"authorization": f"Bearer {OTHER}"},
    "a wrong key": {"authorization": "Bearer wrong"},
    "a key without its scheme": {"authorization": ADMIN},
    "a scheme without a key": {"authorization": "Bearer"},
    "two keys": {"authorization": f"Bearer {KEY}\r\nauthorization: Bearer {ADMIN}"},
    "another site's page": {"origin": "https://page.example"},
    "a client through another site's page": {"authorization": f"Bearer {KEY}", "origin": "https://page.example"},
    "an administrator": {"authorization": f"Bearer {ADMIN}"},
}
RANK = {"a client": Role.READER, "a client of another group": Role.READER, "an administrator": Role.ADMINISTRATOR}
RANK |= {"a client through another site's page": Role.READER}


def may(caller: str, who: Role) -> bool:
    return who <= RANK.get(caller, Role.ANYONE)


def keys() -> tuple[Key, ...]:
    [other] = keys_from_options([OTHER], None)
    return (*keys_from_options([KEY], ADMIN), replace(other, name="other", salt="another-group"))


async def status_of(client: Client, method: str, target: str, **headers: str) -> int:
    body = b"{}" if method in ("POST", "PUT", "PATCH") else None
    client.send(method, target, body, **headers)
    status, _ = await client.head()
    return status


# ---- the router


async def test_what_only_an_administrator_sees_of_replicas_is_in_the_documents() -> None:
    async with served(*Script(says(b"{}")).replicas(1), keys=keys(), demand_key=True) as running:

        async def seen(caller: str, path: str) -> dict[str, Any]:
            async with connect(running.port) as client:
                answer = (await client.get(path, **CALLERS[caller])).json
            found: dict[str, Any] = answer["replica"] if "replica" in answer else answer["replicas"][0]
            return found

        for path in ("/replicas", "/dashboard/replicas/r0"):
            client, administrator = await seen("a client", path), await seen("an administrator", path)
            assert administrator["url"] == running.member("r0").spec.url
            assert client["name"] == administrator["name"] == "r0"
            assert {name: client[name] for name in FOR_ADMINISTRATORS} == FOR_ADMINISTRATORS
    page = (ROOT / "docs" / "security.md").read_text()
    [(said, _)] = re.findall(r"only an administrator sees ((`\w+`[, and\n]*)+)", page)
    assert set(re.findall(r"`(\w+)`", said)) == FOR_ADMINISTRATORS.keys()


@pytest.mark.parametrize("host", [LOCAL, FOREIGN])
@pytest.mark.parametrize("caller", CALLERS)
async def test_the_router_admits_only_the_callers_in_its_table(caller: str, host: str) -> None:
    script = Script(says(b"{}"))
    async with served(*script.replicas(1), keys=keys(), demand_key=True) as running:
        for method, path, route in routes_of(router_routes.TABLE):
            before = len(script.calls)
            async with connect(running.port) as client:
                status = await status_of(client, method, path, host=host, **CALLERS[caller])
            assert (status not in (401, 403)) == may(caller, route.who), (method, path, status)
            if not may(caller, route.who):
                assert len(script.calls) == before, path
        assert len(running.router.members.by_name) == 1


@pytest.mark.parametrize("caller", [name for name in CALLERS if name != "an administrator"])
async def test_without_an_admin_key_administration_is_for_this_machine(caller: str) -> None:
    async with served(*Script(says(b"{}")).replicas(1)) as running:
        for method, path, route in routes_of(router_routes.TABLE):
            if route.who is not Role.ADMINISTRATOR:
                continue
            for host in (LOCAL, FOREIGN):
                async with connect(running.port) as client:
                    status = await status_of(client, method, path, host=host, **CALLERS[caller])
                local = host == LOCAL and "origin" not in CALLERS[caller]
                assert (status not in (401, 403)) == local, (method, path, host)


async def test_a_forbidden_method_reveals_nothing_through_another() -> None:
    async with served(*Script(says(b"{}")).replicas(1), keys=keys(), demand_key=True) as running:
        for method, path, route in routes_of(router_routes.TABLE):
            for other in {"GET", "POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"} - {method}:
                asked = router_routes.TABLE.find(other, parse_path(path.encode()) if path[-1] != "/" else ())
                if asked.route is not None or route.template.endswith("/"):
                    continue
                async with connect(running.port) as client:
                    assert await status_of(client, other, path) == (405 if route.who is Role.ANYONE else 401)


async def test_a_path_that_is_named_is_for_clients_and_nothing_beside_it() -> None:
    script = Script(says(b"{}"))
    paths = ("/v1/videos", "/v1/models")
    async with served(*script.replicas(1), keys=keys(), demand_key=True, client_paths=paths) as running:
        for path, status in {"/v1/videos": 200, "/v1/videos/7": 403, "/v1/models": 405, "/v1/other": 403}.items():
            assert await asked_of(running.port, "POST", path, CALLERS["a client"]) == status
            assert await asked_of(running.port, "POST", path, {}) == 401
        assert [call.target for call in script.calls] == ["/v1/videos"]


# ---- replica and controller


async def asked_of(port: int, method: str, target: str, headers: dict[str, str]) -> int:
    async with connect(port) as client:
        return await status_of(client, method, target, **headers)


@pytest.mark.parametrize("caller", CALLERS)
async def test_a_replica_and_the_controller_admit_only_the_callers_in_their_tables(caller: str, tmp_path: Path) -> None:
    controller = controller_app.build_app(Controller(LocalHosts(tmp_path), StateStore()), ADMIN)
    for table, server in (
        (replica_app.TABLE, replica_serving(SILENT_ENGINE, api_key=ADMIN)),
        (controller_app.TABLE, serving(controller)),
    ):
        async with server as port:
            for method, path, route in routes_of(table):
                status = await asked_of(port, method, path, CALLERS[caller])
                admitted = route.who is Role.ANYONE or caller == "an administrator"
                assert (status != 401) == admitted, (method, path, status)


# ---- odd spellings

ODD = [
    *("%0A", "\n", "%0D", "%00", "%09", "%7F", "%C2%85", "%E2%80%A8", "%20", "/", "//", "/.", "/..", "/./", "%2F"),
    *("%2f", "%5C", "%252F", "%250A", "%25", "%", "%zz", ";x", "/..;x/", ".", "%2E", "%2e%2e", "#", "#x", "?", "?x"),
    *("*", "%FF", "%C0%AF", "\\", "%EF%BC%8F", "%E2%80%AE", "a" * 3000, "_", "%5F", "~"),
]


def spellings(path: str) -> list[str]:
    end = [path + odd for odd in ODD]
    begin = [odd + path for odd in ODD] + [f"http://{LOCAL}{path}", f"HTTP://user@{LOCAL}{path}", f"//{LOCAL}{path}"]
    middle = [
        path.replace("/", odd, 1) if path.count("/") == 1 else path[::-1].replace("/", odd[::-1], 1)[::-1]
        for odd in ODD
    ]
    whole = [path.upper(), path.title(), "".join(f"%{ord(char):02X}" for char in path), path.replace("e", "%65")]
    return [*end, *begin, *middle, *whole]


def sent(target: str) -> bool:
    """Return True if the target is one word of a request line; the parser refuses all others."""
    return not set(target) & {"\n", " "}


@pytest.mark.parametrize("headers", [{}, CALLERS["a client"]], ids=["nobody", "a client"])
@pytest.mark.parametrize(
    ("method", "path"),
    [(method, path) for method, path, route in routes_of(router_routes.TABLE) if route.who is Role.ADMINISTRATOR],
)
async def test_no_spelling_opens_what_is_for_administrators(method: str, path: str, headers: dict[str, str]) -> None:
    script = Script(says(b"{}"))
    body = b'{"url":"http://127.0.0.1:9","model":"m","messages":[]}'
    async with served(*script.replicas(1), keys=keys(), demand_key=bool(headers)) as running:
        for target in filter(sent, spellings(path)):
            async with connect(running.port) as client:
                client.send(method, target, body if method == "POST" else None, **{"host": LOCAL, **headers})
                status, _ = await client.head()
                assert status in (400, 401, 403, 404, 405), (target, status)
        assert list(running.router.members.by_name) == ["r0"]
        assert not script.calls


async def test_a_refused_path_is_quoted_and_counted() -> None:
    async with served() as running, connect(running.port) as client:
        answer = await client.get("/replicas%0A", host=LOCAL)
        assert (answer.status, answer.error["code"]) == (400, "invalid_path")
        assert '"/replicas%0A"' in answer.error["message"]
        assert running.router.history.counts.refused["invalid_path"] == 1


async def test_an_absolute_target_is_the_same_path_on_this_host_and_no_other() -> None:
    async with served(*Script(says(b"{}")).replicas(1), keys=keys(), demand_key=True) as running:
        for target, status in {
            f"http://{LOCAL}/replicas": 200,
            f"HTTP://{LOCAL.upper()}/replicas": 200,
            "http://other.example/replicas": 400,
            f"http://user@{LOCAL}/replicas": 400,
            f"ftp://{LOCAL}/replicas": 400,
            f"http://{LOCAL}": 200,
            f"http://{LOCAL}/prefixes": 403,
        }.items():
            answered = await asked_of(running.port, "GET", target, {"host": LOCAL, **CALLERS["a client"]})
            assert answered == status, target


async def test_a_model_with_a_slash_in_its_name_is_found_in_either_spelling() -> None:
    one = Script(says(b"{}")).replicas(1)[0]
    one.control["/v1/models"] = (200, {"data": [{"id": "org/name"}]})
    async with served(one, ready=False) as running:
        await until(lambda: "org/name" in running.router.members.models, "the model is known")
        for target in ("/v1/models/org%2Fname", "/v1/models/org/name", "/v1/models/org%2fname?x=1"):
            assert await asked_of(running.port, "GET", target, {}) == 200
        assert await asked_of(running.port, "GET", "/v1/models/org%2F..%2Fname", {}) == 400
        assert await asked_of(running.port, "GET", "/v1/models%2Forg", {}) == 400


PATHS = st.sampled_from([(method, path) for method, path, _ in routes_of(router_routes.TABLE)])
EDITS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(ODD) | st.text(max_size=3)), max_size=4)


def lenient(raw: str) -> str:
    """The path as the most obliging of servers would read it."""
    for _ in range(4):
        raw = unquote(raw)
    raw = "".join(char for char in raw.replace("\\", "/") if char.isprintable()).partition("?")[0].partition("#")[0]
    kept: list[str] = []
    for part in raw.lower().split("/"):
        name = part.partition(";")[0]
        if name == "..":
            kept[-1:] = []
        elif name not in ("", "."):
            kept.append(name.rstrip("."))
    return "/" + "/".join(kept)


@given(PATHS, EDITS)
@example(("POST", "/replicas"), [(60, "%0A")])
@example(("GET", "/v1/responses/r"), [(14, "..%2F..%2Freplicas%2F")])
@example(("POST", "/v1/responses/r/cancel"), [(14, "..;")])
@example(("POST", "/v1/responses/r/cancel"), [(14, "..%2F")])
@example(("POST", "/v1/load_lora_adapter"), [(8, "%5F")])
def test_what_is_passed_on_reads_the_same_to_every_server(asked: tuple[str, str], edits: list[tuple[int, str]]) -> None:
    method, path = asked
    for place, odd in edits:
        path = path[:place] + odd + path[place:]
    try:
        target = parse_target(path.encode(), [(b"host", LOCAL.encode())])
        found = router_routes.TABLE.find(method, target.path)
    except ApiError:
        return
    onward = raw_path(target.path)
    assert parse_path(onward) == target.path, "a path that is passed on is read differently"
    if found.route is None or found.route not in router_routes.FORWARDED or found.who is Role.ADMINISTRATOR:
        return
    template = found.route.template
    if "{" not in template:
        assert onward.decode() == template
    else:
        head, _, tail = template.partition("{response_id}")
        read = lenient(onward.decode())
        assert read.startswith(head) and read.endswith(tail) and read.count("/") == template.count("/"), read


# ---- fail closed


async def test_what_comes_to_an_endpoint_past_its_row_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(_: Request) -> Response:
        raise AssertionError("nobody may come here")

    row, other = (
        Route(methods=("GET",), template=template, who=Role.ADMINISTRATOR, endpoint=answer) for template in ("/a", "/b")
    )
    endpoint = guarded(row, answer)
    for state in (
        {},
        {"asked": RouteMatch(other, other.who, {}, "/b")},
        {"asked": RouteMatch(None, Role.CLIENT, {}, "/c")},
    ):
        with pytest.raises(ApiError) as caught:
            await endpoint(Request({"type": "http", "method": "GET", "path": "/a", "headers": [], "state": state}))
        assert caught.value.status == 500
    assert caplog.text.count("by no route; refused") == 3


async def test_every_route_of_the_framework_is_a_row_of_the_table(tmp_path: Path) -> None:
    no_engine: Any = None
    async with served() as running:
        apps: dict[str, Any] = {
            "router": router_app.build_app(running.router, running.front.upkeep, router_routes.TABLE),
            "replica": replica_app.build_app(no_engine, Prompts(ByteTokenizer()), config()),
            "controller": controller_app.build_app(Controller(LocalHosts(tmp_path), StateStore()), ADMIN),
        }
        for name, app in apps.items():
            rows = {(method, route.template) for route in TABLES[name].routes for method in route.methods}
            built = {(method, route.path) for route in app.routes for method in route.methods}
            assert built and built <= rows, name


def test_the_page_on_security_has_these_tables() -> None:
    assert route_tables.PART.text() == route_tables.page(), "run `python -m tests.hostile.route_tables`"
