"""The first backend that works is taken, unless one is asked for by name."""

import pytest

from kernels import backends
from kernels.backends import Backend, choose
from kernels.cpu import CpuAttention


def broken(error: Exception) -> Backend:
    def load() -> CpuAttention:
        raise error

    return Backend("broken", "cpu", load)


def test_a_cpu_gets_the_cpu_path() -> None:
    choice = choose()
    assert choice.attention.name == "cpu" and choice.passed == {}


def test_what_is_asked_for_by_name_is_taken() -> None:
    assert choose("reference").attention.name == "reference"


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("no library"), RuntimeError("no operator")])
def test_what_cannot_be_loaded_is_passed_and_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "ORDER", (broken(error), *backends.ORDER))
    choice = choose()
    assert choice.attention.name == "cpu" and choice.passed == {"broken": str(error)}
    with pytest.raises(ValueError, match=f"attention 'broken' cannot be used on cpu; broken: {error}"):
        choose("broken")


def test_a_mistake_in_the_code_is_not_taken_for_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "ORDER", (broken(KeyError("x")),))
    with pytest.raises(KeyError):
        choose()


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="attention 'fast' cannot be used on cpu; use one of auto, cpu, reference"):
        choose("fast")
