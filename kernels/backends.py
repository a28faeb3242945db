"""Which attention is used: asked for by name, or the first of ORDER that works here.

A backend is a row in ORDER. What is tried may fail as ImportError, OSError (a library that cannot be loaded) or
RuntimeError (an operator that is not there); nowhere else are these caught.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kernels.paged import Attention

AUTO = "auto"


class Backend(NamedTuple):
    name: str
    device: str  # where it works
    load: "Callable[[], Attention]"


class Choice(NamedTuple):
    """What was chosen, and why not those that come before it."""

    attention: "Attention"
    passed: dict[str, str]


def _cpu() -> "Attention":
    from kernels.cpu import CpuAttention

    return CpuAttention()


def _reference() -> "Attention":
    from kernels.reference import ReferenceAttention

    return ReferenceAttention()


# Those of a GPU will come first: `vllm_flash_attn`, then the one inside vllm, torch's varlen_attn, then Triton.
ORDER = (Backend("cpu", "cpu", _cpu), Backend("reference", "cpu", _reference))
NAMES: tuple[str, ...] = (AUTO, *(backend.name for backend in ORDER))


def choose(name: str = AUTO, device: str = "cpu") -> Choice:
    """ValueError if nothing works, or what was asked for does not."""
    candidates = [backend for backend in ORDER if backend.device == device and name in (AUTO, backend.name)]
    passed: dict[str, str] = {}
    for backend in candidates:
        try:
            return Choice(backend.load(), passed)
        except (ImportError, OSError, RuntimeError) as error:
            passed[backend.name] = str(error)
    reasons = "; ".join(f"{backend}: {reason}" for backend, reason in passed.items())
    raise ValueError(f"attention {name!r} cannot be used on {device}; {reasons or 'use one of ' + ', '.join(NAMES)}")
