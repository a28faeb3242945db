"""Classes by objectives: a key is never raised by one."""

import pytest

from router.placement.classes import NAMES, ServiceClass
from router.tenants.keys import CLASSES, HEADERS, Key, Priorities

SLOW = tuple(ServiceClass(name, level, 60.0 * (level + 1)) for level, name in enumerate(NAMES))  # of a file of keys
NEW, OLD = HEADERS


def priorities() -> Priorities:
    made = Priorities()
    made.of = {"urgent": 10, "usual": 0, "whenever": -1}
    return made


def key_of(name: str) -> Key:
    """A key of this class."""
    return Key(name="k", digest=b"", classes=SLOW[NAMES.index(name) :])


@pytest.mark.parametrize(
    ("objective", "wanted"),
    [("urgent", "interactive"), ("usual", "standard"), ("whenever", "batch"), ("no such", "standard")],
)
@pytest.mark.parametrize("header", HEADERS)
def test_without_keys_the_objective_decides(header: bytes, objective: str, wanted: str) -> None:
    found = priorities().service(None, None, [(b"host", b"h"), (header, objective.encode())])
    assert found is CLASSES[NAMES.index(wanted)]


def test_a_request_that_names_no_objective_is_standard() -> None:
    assert priorities().service(None, None, []).name == "standard"
    assert Priorities().service(None, None, [(NEW, b"urgent")]).name == "standard"


def test_of_two_headers_the_newer_counts() -> None:
    headers = [(OLD, b"urgent"), (NEW, b"whenever")]
    assert priorities().service(None, None, headers).name == "batch"


@pytest.mark.parametrize("own", SLOW)
@pytest.mark.parametrize("objective", [b"urgent", b"usual", b"no such", b"\xff"])
def test_a_key_is_not_raised(own: ServiceClass, objective: bytes) -> None:
    assert priorities().service(key_of(own.name), own, [(NEW, objective)]) is own


@pytest.mark.parametrize("own", SLOW)
def test_a_key_is_lowered(own: ServiceClass) -> None:
    assert priorities().service(key_of(own.name), own, [(NEW, b"whenever")]) is SLOW[-1]


@pytest.mark.parametrize(("objective", "wanted"), [(b"urgent", "standard"), (b"whenever", "batch")])
def test_a_key_without_a_class_is_standard(objective: bytes, wanted: str) -> None:
    assert priorities().service(Key(name="k", digest=b""), None, [(NEW, objective)]).name == wanted
