"""Launches that are noted instead of done, and what they compile to: no GPU is needed for either."""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]  # warps and stages

    def __str__(self) -> str:
        kinds = [f"{name}={kind_of(value)}" for name, value in self.arguments.items()]
        return f"{self.kernel.__name__}({', '.join(kinds)}), {self.options}"


class Compiled(NamedTuple):
    cubin: bytes
    shared: int
    registers: int
    stack: int  # registers that did not fit
    ptx: str


def kind_of(value: Any) -> Any:
    """The type of a tensor."""
    return str(value.dtype) if isinstance(value, torch.Tensor) else value


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Record the kernel launches within the block."""
    launches: list[Launch] = []

    def note(kernel: Any, *values: Any, grid: Any, warmup: bool, **named: Any) -> None:
        assert all(size > 0 for size in grid) and not warmup
        arguments = dict(zip(kernel.arg_names, values, strict=False))
        arguments |= {name: value for name, value in named.items() if name in kernel.arg_names}
        options = {name: value for name, value in named.items() if name not in kernel.arg_names}
        launches.append(Launch(kernel, tuple(grid), arguments, options))

    run: Callable[..., Any] = JITFunction.run
    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = run


def compiled(launch: Launch, capability: int = 90) -> Compiled:
    """As Triton would when it launches: it looks whether numbers are 1, and they and pointers multiples of 16."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        specialized = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and specialized):
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
            continue
        signature[parameter.name] = _type(value)
        if specialized and _sixteenfold(value):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    return Compiled(kernel.asm["cubin"], kernel.metadata.shared, *_usage(kernel.asm["cubin"]), kernel.asm["ptx"])


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _sixteenfold(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        told = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return int(found[1]), int(found[2])
