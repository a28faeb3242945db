"""The private names of ray that we use, all of them: a release that lacks one fails here, by that name.

pyproject.toml bounds it by the next minor release; raise a bound when these tests pass with it.
"""

import inspect
import tomllib
from importlib import import_module
from importlib.metadata import version

import pytest

from tests.house import ROOT, files

PRIVATE = ("ray._private", "ray.experimental")
IMPORTED = {  # module: names
    "ray._private": {"state", "worker"},
    "ray._private.node": {"Node"},
    "ray.experimental": {"internal_kv"},
}


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

    switched_off = {"start_api_server", "start_log_monitor", "start_monitor"}  # fleet.on_ray.launch.init
    assert not {*switched_off, "get_logs_dir_path"} - set(dir(Node))


def test_rays_actor_handles_tell_their_ids_and_init_takes_what_we_give() -> None:
    import ray
    from ray.actor import ActorHandle

    assert "self._ray_actor_id" in inspect.getsource(ActorHandle)
    assert isinstance(vars(ActorHandle)["_actor_id"], property)
    assert "_node_ip_address" in inspect.getsource(ray.init)
    assert "_temp_dir" in inspect.getsource(ray.init)


def test_no_other_private_names_are_imported() -> None:
    found: dict[str, set[str]] = {}
    for _, file in files():
        for one in file.imports:
            if one.names and one.module.startswith(PRIVATE):
                found.setdefault(one.module, set()).update(one.names)
    assert found == IMPORTED


def test_the_next_minor_release_is_not_installed_by_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (line for lines in project["optional-dependencies"].values() for line in lines)
    major, minor = map(int, version("ray").split(".")[:2])
    bounds = [line for line in (*project["dependencies"], *extras) if line.startswith(("ray>", "ray["))]
    assert bounds
    assert all(line.endswith(f"<{major}.{minor + 1}") for line in bounds)
