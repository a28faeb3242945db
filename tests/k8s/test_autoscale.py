"""Replicas are scaled by the figures of docs/autoscaling.md, and routers hold requests while there are none."""

import re
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from fleet.control.autoscale import MAX_BUSY
from fleet.plan import Autoscale
from tests.docs.pages import ROOT, blocks
from tests.k8s.commands import values_of
from tests.k8s.rendered import NAMESPACE, Object, of_kind, rendered, title
from tests.k8s.test_metrics import recorded_by
from tests.k8s.validation import mistakes

PAGE = ROOT / "docs" / "autoscaling.md"
SCALED = "kind+all"


def scaler() -> Object:
    [found] = of_kind(rendered(SCALED), "ScaledObject")
    return found


def on_the_page(word: str) -> Any:
    [text] = [text for _, text in blocks(PAGE.read_text()) if word in text]
    return yaml.safe_load(text)


def decimal(quantity: str) -> float:
    return float(quantity.removesuffix("m")) / (1000 if quantity.endswith("m") else 1)


def triggers() -> dict[str, Object]:
    """The metadata of every trigger, by the figure that it asks for."""
    return {re.split(r"[:{]", each["metadata"]["query"])[1]: each["metadata"] for each in scaler()["spec"]["triggers"]}


def test_what_is_scaled_is_there_and_says_no_number_of_its_own() -> None:
    target = scaler()["spec"]["scaleTargetRef"]["name"]
    [deployment] = [each for each in rendered(SCALED) if title(each) == f"Deployment/{target}"]
    assert "replicas" not in deployment["spec"]
    [without] = [each for each in rendered("kind") if title(each) == f"Deployment/{target}"]
    assert without["spec"]["replicas"]


def test_every_figure_is_recorded_and_of_this_namespace() -> None:
    for figure, metadata in triggers().items():
        assert f"warmroute_pool:{figure}" in recorded_by(rendered(SCALED))
        assert metadata["query"] == f'warmroute_pool:{figure}{{namespace="{NAMESPACE}"}}'


def test_targets_are_those_of_a_fleet() -> None:
    found = {figure: float(metadata["threshold"]) for figure, metadata in triggers().items()}
    assert found == {
        "wait_seconds": Autoscale(min=1, max=2).ttft_target_s,
        "busy_replicas": MAX_BUSY,
        "held_memory": MAX_BUSY,
        "open_requests": 64,
    }


def test_a_single_request_wakes_the_pool_and_a_lost_router_ends_nothing() -> None:
    assert scaler()["spec"]["minReplicaCount"] == 0
    for metadata in triggers().values():
        assert "activationThreshold" not in metadata, "more than 0 is what wakes it"
    assert triggers()["open_requests"]["ignoreNullValues"] == "false"


def test_routers_wait_for_the_model_that_they_have_a_tokenizer_of() -> None:
    values = values_of(SCALED, "router")
    assert list(values["expect_model"]) == [folder.partition("=")[0] for folder in values["model_dir"]]
    assert not values_of("kind", "router")["expect_model"]


def test_a_request_waits_for_longer_than_prometheus_and_keda_take() -> None:
    interval_s = 15 + 15 + scaler()["spec"]["pollingInterval"]  # scrape, rule, look
    [replicas] = [each for each in rendered(SCALED) if title(each) == "Deployment/warmroute-replicas"]
    probe = replicas["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    start_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert values_of(SCALED, "router")["queue_timeout"] > interval_s + start_s


def test_the_autoscaler_on_the_page_asks_for_the_same_figures() -> None:
    found = on_the_page("HorizontalPodAutoscaler")
    assert not mistakes(found)
    asked = {
        metric["external"]["metric"]["name"]: metric["external"]["target"]["averageValue"]
        for metric in found["spec"]["metrics"]
    }
    expected = {f"warmroute_pool:{figure}": metadata["threshold"] for figure, metadata in triggers().items()}
    del expected["warmroute_pool:open_requests"]  # it wakes a pool, and this one does not sleep
    assert {name: decimal(value) for name, value in asked.items()} == {
        name: decimal(value) for name, value in expected.items()
    }
    rules = on_the_page("externalRules")
    [rule] = rules["externalRules"]
    pattern = re.search(r'__name__=~"([^"]*)"', rule["seriesQuery"])
    assert pattern is not None
    assert all(re.fullmatch(pattern[1], name) for name in asked)


@pytest.mark.parametrize("field", ["threshold", "query", "serverAddress"])
def test_a_trigger_without_a_field_is_found(field: str) -> None:
    found = yaml.safe_load(yaml.safe_dump(scaler()))
    del found["spec"]["triggers"][0]["metadata"][field]
    assert any(field in mistake for mistake in mistakes(found))
