"""Triton's decorator, with a type: kernels are checked where no Triton is installed, too.

In a kernel `tl.tensor` is what a launch hands over, pointers and numbers, and `tl.constexpr` what it is compiled for.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import triton

Function: TypeAlias = Callable[..., Any]


def jit(function: Function) -> Any:
    return triton.jit(function)


def jit_for_any(*numbers: str) -> Callable[[Function], Any]:
    """Compiled once, whatever these are; of others Triton looks whether they are 1, or multiples of 16."""

    def decorate(function: Function) -> Any:
        return triton.jit(function, do_not_specialize=numbers)

    return decorate


def power_of_two(size: int) -> int:
    """At least so much: all that a kernel's axes may be."""
    return 1 << (size - 1).bit_length()
