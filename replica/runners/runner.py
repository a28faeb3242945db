"""The interface of a runner: the only part in which a simulated engine differs from a real one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replica.messages import TokenLogprobs
from replica.runners.request import Scheduled

if TYPE_CHECKING:  # torch
    from replica.lora.adapter import Adapters


class BlockMemory(Protocol):
    """Callable from any thread. The caller makes sure that nobody writes a block that is read, or reads or writes one
    that is written. A device moves several blocks together sooner than one by one."""

    block_bytes: int  # the size of one block's KV, in all layers
    is_host: bool  # steps are computed in the host's memory, and wait for it while it is copied

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy each block's KV to contiguous memory."""

    def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy contiguous memory, as `read` gives it, to the blocks."""

    def pin(self, host: memoryview) -> None:
        """Prepare the host's memory to and from which most will be copied, if that makes copies faster."""


class ArrayMemory:
    """KV in one array of bytes, [layers, 2, blocks, bytes of one layer's keys or values]."""

    is_host = True

    def __init__(self, array: NDArray[np.uint8]) -> None:
        layers, both, _, size = array.shape
        self.block_bytes = layers * both * size
        self._array = array
        self._shape = layers, both, size

    # numpy copies without the interpreter's lock: other threads go on.

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        for block, target in zip(blocks, into, strict=True):
            np.copyto(np.frombuffer(target, np.uint8).reshape(self._shape), self._array[:, :, block])

    def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            np.copyto(self._array[:, :, block], np.frombuffer(payload, np.uint8).reshape(self._shape))

    def pin(self, host: memoryview) -> None:
        pass


class SampledToken(NamedTuple):
    token: int
    logprobs: TokenLogprobs | None = None


Finish: TypeAlias = Callable[[], list[SampledToken | None]]


class Runner(Protocol):
    num_blocks: int  # blocks of KV; any number, where there is none
    vocab_size: int  # token ids are below it
    attention_name: str  # empty where none is computed
    ahead: bool  # whether a step may be started before the results of the one before it are known
    weights_digest: str  # empty where no block leaves the replica

    @property
    def memory(self) -> BlockMemory | None:
        """Its KV, for lower media; None: there is none."""

    @property
    def adapters(self) -> "Adapters | None":
        """The adapters that it computes with; None: it computes nothing."""

    def start(self, batch: Sequence[Scheduled]) -> Finish:
        """Begin to compute the step, after all that was begun before; what it returns waits for the results.

        They are one entry for each request, None where its chain does not end in this step.

        A runner that runs ahead gets requests whose last token the step before is drawing, and reads it where that is
        drawn. Of a request it may read blocks, chain and `Scheduled.position` only now: until it is asked for the
        results, the blocks may be another's, and the chain longer.
        """


class ImmediateRunner(ABC):
    """A runner that has computed the step when it returns."""

    ahead = False
    weights_digest = ""
    adapters: "Adapters | None" = None

    def start(self, batch: Sequence[Scheduled]) -> Finish:
        results = self.run(batch)
        return lambda: results

    @abstractmethod
    def run(self, batch: Sequence[Scheduled]) -> list[SampledToken | None]: ...
