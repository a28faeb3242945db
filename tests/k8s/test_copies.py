"""Copies in k8s/ equal their sources."""

import yaml  # type: ignore[import-untyped]

from tests.k8s.copies import MONITORING, copies
from tests.k8s.rendered import ROOT, of_kind, rendered


def test_copies_are_equal_to_their_sources() -> None:
    for path, text in copies().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is not up to date: python -m tests.k8s.copies"


def test_every_alert_gets_into_the_cluster() -> None:
    rules = {rule["metadata"]["name"]: rule for rule in of_kind(rendered("kind+all"), "PrometheusRule")}
    rule = rules["warmroute"]
    assert rule["spec"] == yaml.safe_load((MONITORING / "alerts.yaml").read_text())
