"""The private names of uvicorn and ray that we use, all of them: a release that lacks one fails here, by that name.

pyproject.toml bounds both by the next minor release; raise a bound when these tests pass with it.
"""

import inspect
import tomllib
from importlib import import_module
from importlib.metadata import version

import pytest
from starlette.responses import PlainTextResponse
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

from tests.house import ROOT, files

PRIVATE = ("uvicorn.protocols", "uvicorn.server", "ray._private", "ray.experimental")
IMPORTED = {  # module: names
    "ray._private": {"state", "worker"},
    "ray._private.node": {"Node"},
    "ray.experimental": {"internal_kv"},
    "uvicorn.protocols.http.httptools_impl": {"STATUS_LINE", "HttpToolsProtocol", "RequestResponseCycle"},
    "uvicorn.server": {"ServerState"},
}

# ---- uvicorn

PROTOCOL = {
    *("_start_asgi_task", "_unset_keepalive_if_required", "app", "connection_lost", "connection_made", "connections"),
    *("cycle", "data_received", "expect_100_continue", "flow", "headers", "logger", "loop", "on_body", "on_header"),
    *("on_headers_complete", "on_message_begin", "on_message_complete", "on_response_complete", "on_url", "parser"),
    *("pause_writing", "pipeline", "resume_writing", "scope", "send_400_response", "server_state", "shutdown"),
    *("timeout_keep_alive", "transport"),
}
CYCLE = {
    *("body", "disconnected", "keep_alive", "message_event", "more_body", "response_complete", "response_started"),
    "waiting_for_100_continue",
}
FLOW = {"pause_reading", "read_paused", "resume_reading"}
SERVER = {"capture_signals", "main_loop", "on_tick", "should_exit", "server_state", "shutdown", "startup"}
SERVER_STATE = {"connections", "total_requests"}


def config() -> Config:
    return Config(PlainTextResponse("ok"), http=HttpToolsProtocol, log_config=None)


def cycle() -> RequestResponseCycle:
    parameters = dict.fromkeys(inspect.signature(RequestResponseCycle).parameters)
    return RequestResponseCycle(**parameters)  # type: ignore[arg-type]


async def test_uvicorn_has_every_private_name_that_we_use() -> None:
    state = ServerState()
    for owner, names in (
        (HttpToolsProtocol(config(), state, {}), PROTOCOL),
        (cycle(), CYCLE),
        (FlowControl(None), FLOW),  # type: ignore[arg-type]
        (Server(config()), SERVER),
        (state, SERVER_STATE),
    ):
        assert not names - set(dir(owner)), type(owner).__name__
    assert STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"


def test_uvicorn_counts_ticks_ten_times_a_second() -> None:
    assert "counter % 10 == 0" in inspect.getsource(Server.on_tick)  # api.http.server.TICKS_PER_SWEEP
    assert "asyncio.sleep(0.1)" in inspect.getsource(Server.main_loop)  # that ours does without


# ---- ray


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("ray._private.state", {"actors", "available_resources_per_node"}),
        ("ray._private.worker", {"_global_node"}),
        ("ray.experimental.internal_kv", {"_internal_kv_del", "_internal_kv_get", "_internal_kv_put"}),
    ],
)
def test_ray_has_every_private_name_that_we_use(module: str, names: set[str]) -> None:
    assert not names - set(dir(import_module(module)))


def test_rays_node_has_every_name_that_we_use() -> None:
    from ray._private.node import Node
    from ray._private.services import ProcessInfo

    switched_off = {"start_api_server", "start_log_monitor", "start_monitor"}  # fleet.on_ray.local.init
    assert not {*switched_off, "get_gcs_client", "get_logs_dir_path", "start_gcs_server"} - set(dir(Node))
    set_by_it = inspect.getsource(Node)
    assert all(f"self.{name}" in set_by_it for name in ("_gcs_address", "_gcs_client", "all_processes"))
    assert "process" in ProcessInfo._fields


def test_rays_actor_handles_tell_their_ids_and_init_takes_what_we_give() -> None:
    import ray
    from ray.actor import ActorHandle

    assert "self._ray_actor_id" in inspect.getsource(ActorHandle)
    assert isinstance(vars(ActorHandle)["_actor_id"], property)
    assert "_node_ip_address" in inspect.getsource(ray.init)
    assert "_temp_dir" in inspect.getsource(ray.init)


# ---- both


def test_no_other_private_names_are_imported() -> None:
    found: dict[str, set[str]] = {}
    for _, file in files():
        for one in file.imports:
            if one.names and one.module.startswith(PRIVATE):
                found.setdefault(one.module, set()).update(one.names)
    assert found == IMPORTED


@pytest.mark.parametrize("name", ["uvicorn", "ray"])
def test_the_next_minor_release_is_not_installed_by_itself(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (line for lines in project["optional-dependencies"].values() for line in lines)
    major, minor = map(int, version(name).split(".")[:2])
    bounds = [line for line in (*project["dependencies"], *extras) if line.partition(">=")[0].partition("[")[0] == name]
    assert bounds
    assert all(line.endswith(f"<{major}.{minor + 1}") for line in bounds)
