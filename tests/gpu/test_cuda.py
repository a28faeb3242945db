"""GPU-only code calls torch correctly; torch's side is faked."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kernels.paged import KvShape
from tests.gpu import run as script
from tests.gpu.place import Place, backends, chosen
from tests.gpu.timing import seconds

PLACE = Place(torch.device("cuda"), quick=True, until_s=time.monotonic() + 1000)


class Event:
    """An event that comes when it is recorded."""

    now_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = -1.0

    def record(self) -> None:
        Event.now_ms += 1000
        self.at_ms = Event.now_ms

    def synchronize(self) -> None:
        assert self.at_ms >= 0

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


class Graph:
    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


@contextmanager
def capturing(graph: Graph) -> Iterator[None]:
    assert isinstance(graph, Graph)
    yield


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    Graph.replays = 0
    for name, stands_in in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capturing,
        "synchronize": lambda: None,
        "is_available": lambda: True,
        "get_device_capability": lambda: (9, 0),
        "get_device_properties": lambda _: SimpleNamespace(name="Pretended", total_memory=80 * 2**30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)


def test_calls_are_captured_once_and_timed_by_events() -> None:
    called: list[int] = []
    calls = [lambda number=number: called.append(number) for number in range(4)]
    assert seconds(PLACE, calls, 3) == [0.25] * 3
    assert called == [*range(4)] * 2 and Graph.replays == 4  # compiled, captured; warm, and three times


def test_without_a_graph_they_are_called_each_time() -> None:
    called: list[int] = []
    assert seconds(PLACE, [lambda: called.append(1)], 3, graph=False) == [1.0] * 3
    assert len(called) == 5 and not Graph.replays


def test_all_kinds_of_attention_are_tried_and_why_some_do_not_work_is_kept() -> None:
    loaded, passed = backends(PLACE, KvShape(torch.float32, 16, 64))
    assert "torch" in [attention.name for attention in loaded]
    assert passed.keys() >= {"flash3", "flash3-vllm"} and "computes" in passed["flash3"]
    assert chosen(PLACE, KvShape(torch.float32, 16, 64)).attention.name in ("triton", "torch")


def test_what_it_runs_on_is_described() -> None:
    found = script.described("cuda")
    assert found["device"] == "Pretended, 80 GiB" and found["torch"] == torch.__version__
    assert found["attention"].startswith(("triton", "torch")) and "not flash3: " in found["attention"]
    assert found["driver"]
