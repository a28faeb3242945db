"""Triton's decorator with a type, so that kernels are type-checked without Triton.

In a kernel `tl.tensor` is what a launch hands over, pointers and numbers, and `tl.constexpr` what it is compiled for.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import triton

Function: TypeAlias = Callable[..., Any]


def jit(function: Function) -> Any:
    return triton.jit(function)


def jit_for_any(*numbers: str) -> Callable[[Function], Any]:
    """A kernel compiled once for all values of these arguments; others are specialized on 1 and multiples of 16."""

    def decorate(function: Function) -> Any:
        return triton.jit(function, do_not_specialize=numbers)

    return decorate


def power_of_two(size: int) -> int:
    """The smallest power of two not below `size`: the axes of a kernel must be powers of two."""
    return 1 << (size - 1).bit_length()
