"""Chooses the attention backend: by name, or the first of ORDER that works here.

A backend is a row in ORDER. What is tried may fail as ImportError, OSError (a library that cannot be loaded) or
RuntimeError (an operator that is not there, or cannot compute this); nowhere else are these caught.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kernels.paged import Attention, KvShape

AUTO = "auto"


class Backend(NamedTuple):
    name: str
    device: str  # the device that it works on
    source: str  # module:name, of a class that computes whatever it is given, or of a function that says if it can

    def load(self, shape: "KvShape") -> "Attention[Any]":
        """Make it for such KV."""
        module, name = self.source.split(":")
        make = getattr(import_module(module), name)
        attention: Attention[Any] = make() if isinstance(make, type) else make(shape)
        return attention


class ChosenAttention(NamedTuple):
    """The chosen backend, and why earlier ones were not usable."""

    attention: "Attention[Any]"
    passed: dict[str, str]


ORDER = (
    Backend("cpu", "cpu", "kernels.cpu:CpuAttention"),
    Backend("flash3", "cuda", "kernels.gpu.flash:own_flash3"),
    Backend("flash3-vllm", "cuda", "kernels.gpu.flash:flash3_of_vllm"),
    Backend("triton", "cuda", "kernels.gpu.attention:tried"),
    Backend("torch", "cuda", "kernels.plain:PlainAttention"),
)
NAMES: tuple[str, ...] = (AUTO, *(backend.name for backend in ORDER))


def choose(name: str, device: str, shape: "KvShape") -> ChosenAttention:
    """Load the named backend, or the first that works; raise ValueError if none does."""
    there = [backend for backend in ORDER if backend.device == device]
    passed: dict[str, str] = {}
    for backend in there:
        if name not in (AUTO, backend.name):
            continue
        try:
            return ChosenAttention(backend.load(shape), passed)
        except (ImportError, OSError, RuntimeError) as error:
            passed[backend.name] = str(error)
    reasons = "; ".join(f"{backend}: {reason}" for backend, reason in passed.items())
    names = ", ".join((AUTO, *(backend.name for backend in there)))
    raise ValueError(f"attention {name!r} cannot be used on {device}; {reasons or 'use one of ' + names}")
