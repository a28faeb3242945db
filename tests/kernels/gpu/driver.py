"""A GPU's driver without a GPU: Triton looks at each launch as it always does, and what it would compile is noted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

DEVICE = 1000  # no real one


class NoDriver:
    """An H200's, but for launches."""

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Uncompiled:
    """A kernel that does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None: ...


@contextmanager
def noted_compiles() -> Iterator[list[str]]:
    """Note what is compiled within the block: each kernel for each kind of arguments that it is new to."""
    compiles: list[str] = []
    kernels: set[Any] = set()

    def note(kernel: Any, key: str, signature: dict[str, str], *_: object, **__: object) -> Uncompiled:
        compiles.append(f"{kernel.__name__}: {signature}, {key}")
        kernels.add(kernel)
        made = kernel.device_caches[DEVICE][0][key] = Uncompiled()
        return made

    before, compile_one = driver._active, JITFunction._do_compile
    driver.set_active(NoDriver())
    JITFunction._do_compile = note
    try:
        yield compiles
    finally:
        for kernel in kernels:
            kernel.device_caches.clear()
        JITFunction._do_compile = compile_one
        driver._active = before
