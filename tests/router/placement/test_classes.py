import pytest

from router.placement.classes import FIRST_TOKEN_S, NAMES, WEIGHTS, ServiceClass, chosen

ALL = tuple(ServiceClass(name, level, FIRST_TOKEN_S[name], WEIGHTS[name]) for level, name in enumerate(NAMES))


@pytest.mark.parametrize(
    ("own", "tier", "priority", "wanted"),
    [
        ("standard", None, None, "standard"),
        ("standard", "auto", None, "standard"),
        ("standard", "flex", None, "batch"),
        ("standard", "batch", None, "batch"),
        ("standard", "priority", None, "standard"),
        ("interactive", "default", None, "standard"),
        ("interactive", "standard_only", None, "standard"),
        ("interactive", "priority", None, "interactive"),
        ("interactive", "no such tier", None, "interactive"),
        ("standard", None, 0, "standard"),
        ("standard", None, 1, "batch"),
        ("standard", None, -1, "standard"),
        ("interactive", None, -(2**70), "interactive"),
        ("interactive", "default", 5, "standard"),
        ("batch", "priority", -5, "batch"),
    ],
)
def test_a_request_gets_the_class_that_it_asks_for_if_that_is_no_higher(
    own: str, tier: str | None, priority: int | None, wanted: str
) -> None:
    found = chosen(ALL[NAMES.index(own) :], tier, priority)
    assert found is not None
    assert found.name == wanted


def test_without_classes_nothing_asked_for_counts() -> None:
    assert chosen((), "priority", -1) is None
