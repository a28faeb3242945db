"""Metrics that rules and autoscalers ask for are on their page."""

import re

import pytest

from tests.k8s.rendered import ROOT, VARIANTS, Object, of_kind, rendered


def known_metrics() -> set[str]:
    return set(re.findall(r"^\| `([\w:]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))


def metrics_asked(objects: list[Object]) -> set[str]:
    rules = [
        rule
        for each in of_kind(objects, "PrometheusRule")
        for group in each["spec"]["groups"]
        for rule in group["rules"]
    ]
    named = {name for rule in rules for name in re.findall(r"\b(?:vllm|warmroute\w*):\w+", rule["expr"])}
    scalers = [metric for each in of_kind(objects, "HorizontalPodAutoscaler") for metric in each["spec"]["metrics"]]
    return named | {metric["pods"]["metric"]["name"] for metric in scalers if metric["type"] == "Pods"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_metric_that_is_asked_for_is_on_its_page(variant: str) -> None:
    asked = {re.sub(r"_(bucket|count|sum)$", "", name) for name in metrics_asked(rendered(variant))}
    assert asked <= known_metrics()
    assert bool(asked) == variant.endswith("+all")


@pytest.mark.parametrize("variant", VARIANTS)
def test_scaling_needs_no_metrics_but_the_cpu_unless_it_is_asked_for(variant: str) -> None:
    [scaler] = of_kind(rendered(variant), "HorizontalPodAutoscaler")
    kinds = [metric["type"] for metric in scaler["spec"]["metrics"]]
    assert kinds == (["Resource", "Pods"] if variant.endswith("+all") else ["Resource"])
