"""Every finding of the scan is fixed or excepted, and no exception is unused."""

import pytest

from tests.k8s.rendered import VARIANTS, pods, rendered
from tests.k8s.scan import EXCEPTIONS, Excepted, Finding, as_object, exceptions, judged

FOUND = Finding("CKV_1", "Pod.warmroute.one", "it is open")


def test_a_finding_is_reported() -> None:
    assert judged([FOUND], []) == ["CKV_1 Pod.warmroute.one: it is open"]


@pytest.mark.parametrize("about", ["Pod.warmroute.one", "Pod.*", "*.one"])
def test_an_exception_covers_what_its_pattern_says(about: str) -> None:
    assert judged([FOUND], [Excepted("CKV_1", (about,), "it is meant so")]) == []


def test_a_pattern_without_a_finding_is_reported() -> None:
    [unused] = judged([FOUND], [Excepted("CKV_1", ("*.one", "*.two"), "it is meant so")])
    assert unused.startswith("CKV_1 *.two")


def test_every_exception_has_its_reason() -> None:
    excepted = exceptions(EXCEPTIONS.read_text())
    assert all(each.reason.endswith(".") and each.about for each in excepted)
    assert len({each.check for each in excepted}) == len(excepted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_of_ray_are_scanned_as_pods(variant: str) -> None:
    """Their names are distinct, so that exceptions can refer to them."""
    made = [as_object(pod) for pod in pods(rendered(variant)) if pod.owner.startswith("RayCluster/")]
    names = [each["metadata"]["name"] for each in made]
    assert len(set(names)) == len(names) and all("/" not in name for name in names)
