"""Try a built layer: start it as the image would, run its health check, end it by a signal."""

import json
import signal
import time
from contextlib import closing
from pathlib import Path

from qualification.images.building import Container
from qualification.images.dockerfile import Dockerfile
from tests.events.processes import wait_until

PATIENCE_S = 50.0
# KubeRay's command for a head, except its address, and the URLs of its probes.
RAY = (
    "ulimit -n 65536; ray start --head --block --node-ip-address=127.0.0.1 --num-cpus=1 --object-store-memory=100000000"
)
PROBE = """
import sys, urllib.request
asked = ("http://127.0.0.1:52365/api/local_raylet_healthz", "http://127.0.0.1:8265/api/gcs_healthz")
sys.exit([urllib.request.urlopen(url, timeout=2).read() for url in asked] != [b"success"] * 2)
"""


def health_check(dockerfile: Dockerfile, target: str) -> list[str]:
    value = dockerfile.last(target, "HEALTHCHECK").value
    command: list[str] = json.loads(value[value.index("[") :])
    return command


def try_out(dockerfile: Dockerfile, target: str, layer: Path) -> str:
    """Start and stop the image's command; return the outcome in a line."""
    with closing(Container(dockerfile, target, layer)) as container:
        healthy_s = _healthy_after_s(container, health_check(dockerfile, target))
        container.signal(signal.SIGTERM)
        status, said = container.wait(PATIENCE_S)
    assert status == 0, said
    return f"as process 1, user 10001, read-only: healthy after {healthy_s:.1f} s, status {status} after SIGTERM"


def try_ray(dockerfile: Dockerfile, target: str, layer: Path) -> str:
    with closing(Container(dockerfile, target, layer, [RAY], ["/bin/bash", "-c", "--"])) as container:
        healthy_s = _healthy_after_s(container, ["python", "-c", PROBE])
        assert container.execute("ray", "health-check", "--address", "127.0.0.1:6379").returncode == 0
        container.signal(signal.SIGTERM)
        container.wait(PATIENCE_S)
    return f"as a Ray head, the same way: KubeRay's probes pass after {healthy_s:.1f} s"


def _healthy_after_s(container: Container, command: list[str]) -> float:
    started_s = time.monotonic()
    wait_until(lambda: _succeeds(container, command), "it is healthy")
    return time.monotonic() - started_s


def _succeeds(container: Container, command: list[str]) -> bool:
    assert container.running, f"the container exited: {container.wait(1)}"
    return container.execute(*command).returncode == 0
