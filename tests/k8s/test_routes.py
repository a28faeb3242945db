"""Clients' routes to routers: through any of them, and through proxies that cut no stream."""

import pytest

from router.config import RouterConfig
from tests.k8s.rendered import ALL, OVERLAYS, Object, of_kind, rendered

NGINX = "nginx.ingress.kubernetes.io"


def service(variant: str, name: str) -> Object:
    [found] = [each for each in of_kind(rendered(variant), "Service") if each["metadata"]["name"] == name]
    spec: Object = found["spec"]
    return spec


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_any_router_will_do_and_only_those_that_are_ready(overlay: str) -> None:
    spec = service(overlay, "warmroute-router")
    assert spec["sessionAffinity"] == "None"
    assert not spec.get("publishNotReadyAddresses")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_router_can_be_asked_whether_it_is_ready_or_not(overlay: str) -> None:
    spec = service(overlay, "warmroute-router-headless")
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)


def test_replicas_that_are_not_ready_are_none() -> None:
    spec = service("kind", "warmroute-replicas")
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", False)


@pytest.mark.parametrize("overlay", ["ray-cpu", "gpu", "ha"])
def test_the_registry_can_be_asked_before_the_head_is_ready(overlay: str) -> None:
    assert service(overlay, "warmroute-fleet")["publishNotReadyAddresses"] is True


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_gateway_cuts_no_stream(overlay: str) -> None:
    [route] = of_kind(rendered(overlay + ALL), "HTTPRoute")
    for rule in route["spec"]["rules"]:
        assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
        assert [match["path"]["value"] for match in rule["matches"]] == ["/v1"], "admin routes must not be public"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_ingress_holds_back_and_cuts_nothing_that_a_router_takes(overlay: str) -> None:
    [ingress] = of_kind(rendered(overlay + ALL), "Ingress")
    said = {name.removeprefix(f"{NGINX}/"): value for name, value in ingress["metadata"]["annotations"].items()}
    config = RouterConfig()
    assert (said["proxy-buffering"], said["proxy-request-buffering"]) == ("off", "off")
    assert float(said["proxy-read-timeout"]) > max(config.first_token_timeout_s, config.idle_timeout_s)
    assert float(said["proxy-send-timeout"]) > config.idle_timeout_s
    assert int(said["proxy-body-size"].removesuffix("m")) * 2**20 >= config.max_body_bytes
    assert said["proxy-next-upstream"] == "off", "the router already retries on other replicas"
    [rule] = ingress["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"], "admin routes must not be public"
