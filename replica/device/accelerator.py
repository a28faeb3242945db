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
        with torch.cuda.graph(graph, pool=pool):
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


PIECE_BYTES = 64 << 20


class Uploads:
    """Tensors go through two pieces of pinned memory in turns: while the device reads one, the other is filled."""

    def __init__(self, accelerator: Accelerator, piece_bytes: int = PIECE_BYTES) -> None:
        self._accelerator = accelerator
        self._hosts = [accelerator.host_bytes(piece_bytes) for _ in range(2)]
        self._waits: list[Wait] = [lambda: None, lambda: None]
        self._piece_bytes = piece_bytes

    def send(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device; work that is given to the device from now on finds it there."""
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._accelerator.device)
        source, target = (whole.view(-1).view(torch.uint8) for whole in (tensor.contiguous(), sent))
        for begin in range(0, len(source), self._piece_bytes):
            piece = source[begin : begin + self._piece_bytes]
            self._hosts.reverse()
            self._waits.reverse()
            self._waits[0]()
            host = self._hosts[0][: len(piece)]
            host.copy_(piece)
            target[begin : begin + len(piece)].copy_(host, non_blocking=True)
            self._waits[0] = self._accelerator.mark()
        return sent
