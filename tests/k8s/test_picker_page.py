"""The manifests in docs/picker.md fit together, and start a picker that has these settings."""

from typing import Any

import click
import msgspec
import yaml  # type: ignore[import-untyped]

from router.members.discovery.pool import InferencePool, Target, target_of
from router.process.cli import picker
from router.process.configure import config_of
from tests.docs.pages import ROOT, blocks
from tests.k8s.validation import mistakes

PAGE = ROOT / "docs" / "picker.md"


def manifests() -> dict[str, Any]:
    [text] = [text for _, text in blocks(PAGE.read_text()) if "InferencePool" in text]
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def test_the_pool_asks_the_service_of_the_pickers() -> None:
    found = manifests()
    assert not any(mistakes(found[kind]) for kind in ("Deployment", "Service", "HTTPRoute"))
    reference = found["InferencePool"]["spec"]["endpointPickerRef"]
    service, template = found["Service"], found["Deployment"]["spec"]["template"]
    assert reference["name"] == service["metadata"]["name"]
    assert reference["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert template["metadata"]["labels"] == found["Deployment"]["spec"]["selector"]["matchLabels"]
    [rule] = found["HTTPRoute"]["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == found["InferencePool"]["metadata"]["name"]


def test_the_picker_follows_the_pool_and_listens_where_it_is_asked() -> None:
    found = manifests()
    [container] = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["warmroute", "picker"]
    context = picker.make_context("picker", [*container["args"], "--kubernetes-api", "http://127.0.0.1:1"])
    assert isinstance(context, click.Context)
    config = config_of(context.params)
    assert config.kubernetes is not None
    name = config.kubernetes.pool
    assert target_of(msgspec.convert(found["InferencePool"], InferencePool)) == Target(str(name), "app=llm", (8000,))
    port = found["InferencePool"]["spec"]["endpointPickerRef"]["port"]["number"]
    assert config.picker_listen == f"0.0.0.0:{port}"
    assert {"containerPort": port} in container["ports"]
    for probe in ("readiness", "liveness"):
        assert container[f"{probe}Probe"]["grpc"] == {"port": port, "service": probe}
