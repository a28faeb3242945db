"""The device beyond tensors: memory, graphs, and marks in the order of its work."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

Replay = Callable[[], None]
Wait = Callable[[], None]


class Memory(NamedTuple):
    """In bytes."""

    free: int  # to all processes
    total: int
    own: int  # the bytes that this process has taken for tensors


class Span(NamedTuple):
    """A device's memory before a model was loaded, and after."""

    before: Memory
    after: Memory


class Accelerator:
    """A CUDA device, which becomes the current one."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.use()

    def use(self) -> None:
        """Make it the current device of this thread; a new one would have the first."""
        torch.cuda.set_device(self.device)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def host_bytes(self, size: int) -> Tensor:
        """Memory of the host that is copied to and from the device without waiting."""
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: memoryview) -> bool:
        """Let copies to and from this memory of the host go without waiting, for good. False: it cannot."""
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        done = int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)) == 0
        if not done:
            with suppress(RuntimeError):  # torch raises CUDA's last error at the next launch, whatever that is
                torch.zeros(1, device=self.device)
        return done

    def mark(self) -> Wait:
        """Return a function that waits until the device has done all it was given so far."""
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def beside(self) -> Callable[[Callable[[], object]], None]:
        """Return a function that has work done beside all other, and waits for it; for one thread at a time."""
        stream = torch.cuda.Stream()

        def run(work: Callable[[], object]) -> None:
            with torch.cuda.stream(stream):
                work()
            stream.synchronize()

        return run

    def pool(self) -> object:
        """Memory for graphs of which no two run at the same time."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], object], pool: Any) -> Replay:
        """Return a function that repeats, in the same memory, all work that `run` gives to the device."""
        graph = torch.cuda.CUDAGraph()
        # NCCL looks after its work on a thread of its own, which is no part of the graph.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def memory(self) -> Memory:
        """Return the device's memory, after unused memory was given back to it."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return Memory(*torch.cuda.mem_get_info(), torch.cuda.memory_reserved())

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """So much more than before is taken while this runs."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
