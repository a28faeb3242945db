"""Chooses the attention backend: by name, or the first of ORDER that works here.

A backend is a row in ORDER. What is tried may fail as ImportError, OSError (a library that cannot be loaded) or
RuntimeError (an operator that is not there, or cannot compute this); nowhere else are these caught.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from kernels.paged import Attention

AUTO = "auto"


class Backend(NamedTuple):
    name: str
    device: str  # where it works
    load: "Callable[[torch.dtype, int], Attention[Any]]"  # for such numbers, in blocks of such a size


class ChosenAttention(NamedTuple):
    """The chosen backend, and why earlier ones were not usable."""

    attention: "Attention[Any]"
    passed: dict[str, str]


def _own_flash3(dtype: "torch.dtype", block_size: int) -> "Attention[Any]":
    from kernels.gpu.flash import own_flash3

    return own_flash3(dtype, block_size)


def _flash3_of_vllm(dtype: "torch.dtype", block_size: int) -> "Attention[Any]":
    from kernels.gpu.flash import flash3_of_vllm

    return flash3_of_vllm(dtype, block_size)


def _varlen(dtype: "torch.dtype", block_size: int) -> "Attention[Any]":
    from kernels.gpu.flash import varlen

    return varlen(dtype, block_size)


def _triton(dtype: "torch.dtype", block_size: int) -> "Attention[Any]":
    from kernels.gpu.attention import tried

    return tried(dtype, block_size)


def _plain(_dtype: "torch.dtype", _block_size: int) -> "Attention[Any]":
    from kernels.plain import PlainAttention

    return PlainAttention()


def _cpu(_dtype: "torch.dtype", _block_size: int) -> "Attention[Any]":
    from kernels.cpu import CpuAttention

    return CpuAttention()


def _reference(_dtype: "torch.dtype", _block_size: int) -> "Attention[Any]":
    from kernels.reference import ReferenceAttention

    return ReferenceAttention()


ORDER = (
    Backend("cpu", "cpu", _cpu),
    Backend("reference", "cpu", _reference),
    Backend("flash3", "cuda", _own_flash3),
    Backend("flash3-vllm", "cuda", _flash3_of_vllm),
    Backend("varlen", "cuda", _varlen),
    Backend("triton", "cuda", _triton),
    Backend("torch", "cuda", _plain),
)
NAMES: tuple[str, ...] = (AUTO, *(backend.name for backend in ORDER))


def choose(name: str, device: str, dtype: "torch.dtype", block_size: int) -> ChosenAttention:
    """Load the named backend, or the first that works; raise ValueError if none does."""
    there = [backend for backend in ORDER if backend.device == device]
    passed: dict[str, str] = {}
    for backend in there:
        if name not in (AUTO, backend.name):
            continue
        try:
            return ChosenAttention(backend.load(dtype, block_size), passed)
        except (ImportError, OSError, RuntimeError) as error:
            passed[backend.name] = str(error)
    reasons = "; ".join(f"{backend}: {reason}" for backend, reason in passed.items())
    names = ", ".join((AUTO, *(backend.name for backend in there)))
    raise ValueError(f"attention {name!r} cannot be used on {device}; {reasons or 'use one of ' + names}")
