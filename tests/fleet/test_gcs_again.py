"""The GCS of a real Ray node is started again while another thread asks it how the raylet is."""

import importlib.util
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.on_ray import local
from fleet.on_ray.local import GCS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
ENOUGH_S = 0.3  # for the other thread to fail


def test_the_look_for_a_raylet_outlives_a_gcs_that_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import worker
    from ray._private.node import Node

    alive = SimpleNamespace(state=1, ALIVE=1)
    asked = threading.Event()
    seen: list[bool | None] = []

    class Client:
        def get_all_node_info(self, timeout: float) -> dict[str, Any]:  # noqa: ARG002  Ray's name
            return {"raylet": alive}

    def look() -> None:
        asked.set()
        seen.append(local.raylet_lives(1))

    looking = threading.Thread(target=look)

    class Started(Node):
        """A node of Ray whose GCS needs no process."""

        def __init__(self) -> None:
            self.head = True
            self._gcs_client: Any = Client()
            self._gcs_address = "127.0.0.1:1"
            self.all_processes = {GCS: [SimpleNamespace(process=SimpleNamespace(wait=lambda: 0))]}

        def start_gcs_server(self) -> None:
            looking.start()
            assert asked.wait(5)
            looking.join(ENOUGH_S)
            self.all_processes[GCS] = [SimpleNamespace(process=SimpleNamespace(pid=5))]

    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda error: failed.append(error.exc_value))
    monkeypatch.setattr(worker, "_global_node", Started())
    assert local.start_gcs_again() == 5
    looking.join(5)
    assert failed == []
    assert seen == [True]
