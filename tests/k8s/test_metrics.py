"""Metrics that rules and autoscalers ask for are on their page."""

import re

import pytest

from tests.k8s.rendered import ROOT, VARIANTS, Object, of_kind, rendered


def known_metrics() -> set[str]:
    return set(re.findall(r"^\| `([\w:]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))


def rules_in(objects: list[Object]) -> list[Object]:
    return [
        rule
        for each in of_kind(objects, "PrometheusRule")
        for group in each["spec"]["groups"]
        for rule in group["rules"]
    ]


def recorded_by(objects: list[Object]) -> set[str]:
    return {rule["record"] for rule in rules_in(objects) if "record" in rule}


def metrics_asked(objects: list[Object]) -> set[str]:
    triggers = [trigger for each in of_kind(objects, "ScaledObject") for trigger in each["spec"]["triggers"]]
    asked = [rule["expr"] for rule in rules_in(objects)] + [trigger["metadata"]["query"] for trigger in triggers]
    named = {name for query in asked for name in re.findall(r"\b(?:vllm|warmroute\w*):\w+", query)}
    scalers = [metric for each in of_kind(objects, "HorizontalPodAutoscaler") for metric in each["spec"]["metrics"]]
    return named | {metric["pods"]["metric"]["name"] for metric in scalers if metric["type"] == "Pods"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_metric_that_is_asked_for_is_on_its_page(variant: str) -> None:
    objects = rendered(variant)
    asked = {re.sub(r"_(bucket|count|sum)$", "", name) for name in metrics_asked(objects)}
    assert asked <= known_metrics() | recorded_by(objects)
    assert bool(asked) == variant.endswith("+all")


@pytest.mark.parametrize("variant", VARIANTS)
def test_scaling_needs_no_metrics_but_the_cpu_unless_it_is_asked_for(variant: str) -> None:
    [scaler] = of_kind(rendered(variant), "HorizontalPodAutoscaler")
    kinds = [metric["type"] for metric in scaler["spec"]["metrics"]]
    assert kinds == (["Resource", "Pods"] if variant.endswith("+all") else ["Resource"])
