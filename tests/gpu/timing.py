"""Device times by CUDA events. Calls take turns, so that no cache holds their inputs."""

import time
from collections.abc import Callable, Sequence

import torch

from tests.gpu.place import Place

Call = Callable[[], object]


def seconds(place: Place, calls: Sequence[Call], rounds: int, *, graph: bool = True) -> list[float]:
    """Mean seconds of a call in each round; a round is all calls. A graph has no host waits between them."""
    run = _replay(calls) if graph and place.is_gpu else _all(calls)
    run()
    place.synchronize()
    return [_timed(place, run) / len(calls) for _ in range(rounds)]


def _all(calls: Sequence[Call]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    run()  # compiles
    return run


def _replay(calls: Sequence[Call]) -> Callable[[], None]:
    run = _all(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _timed(place: Place, run: Callable[[], None]) -> float:
    if not place.is_gpu:
        began_s = time.perf_counter()
        run()
        return time.perf_counter() - began_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
