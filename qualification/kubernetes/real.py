"""A real API server with its etcd, on loopback: no scheduler, no kubelet; a test does what those would."""

import asyncio
import json
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from router.members.discovery.collection import Cluster
from tests.router.kubernetes_api import SPACE, Object
from tests.router.scripted import refused_port

START_S = 60.0
STOP_S = 20.0
ADMIN, ROUTER = "admin-token", "router-token"
ROLES = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SPACE}"
DOCS = Path(__file__).parents[2] / "docs" / "discovery.md"
MERGE = {"content-type": "application/merge-patch+json"}
TOKENS = """\
admin-token,admin,admin,system:masters
router-token,system:serviceaccount:space:warmroute-router,router,"system:serviceaccounts,system:serviceaccounts:space"
"""


def program(name: str) -> str | None:
    """In the folder that tests of controllers use, too, or on PATH."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    return shutil.which(name, path=f"{assets}:{os.environ.get('PATH', '')}" if assets else None)


def no_cluster(*more: str) -> str | None:
    """Why there can be none here."""
    missing = [name for name in ("etcd", "kube-apiserver", "openssl", *more) if program(name) is None]
    if missing:
        return f"needs {' and '.join(missing)} in the folder $KUBEBUILDER_ASSETS, or on PATH"
    return None


def needing_a_cluster(*more: str) -> list[pytest.MarkDecorator]:
    """Marks of tests that need one."""
    why = no_cluster(*more)
    return [pytest.mark.live, pytest.mark.timeout(180), pytest.mark.skipif(why is not None, reason=str(why))]


async def until(condition: Callable[[], object], within_s: float = 20.0) -> float:
    """Wait for the condition; return the seconds it took."""
    since_s = time.monotonic()
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
    return time.monotonic() - since_s


class RealApi:
    """Roles count (RBAC); who asks is known by token."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = refused_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.ca_file = folder / "certificates" / "apiserver.crt"
        self._etcd_port = refused_port()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        key = folder / "accounts.key"
        subprocess.run([str(program("openssl")), "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (folder / "tokens.csv").write_text(TOKENS)
        (folder / "router-token").write_text(ROUTER)

    # ---- processes

    def start_etcd(self) -> None:
        clients = f"http://127.0.0.1:{self._etcd_port}"
        self._start(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls=http://127.0.0.1:{refused_port()}",
        )

    def start(self) -> None:
        """Returns when it is ready."""
        key = self.folder / "accounts.key"
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self.ca_file.parent}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.0.0.0/24",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",  # a controller that does not run makes accounts
        )
        until_s = time.monotonic() + START_S
        while not self._is_ready():
            assert self._running["kube-apiserver"].poll() is None, self._log("kube-apiserver")
            assert time.monotonic() < until_s, self._log("kube-apiserver")
            time.sleep(0.05)

    def start_controllers(self, *names: str) -> None:
        """Start the controllers that make pods of deployments."""
        user = {"user": {"token": ADMIN}, "name": "admin"}
        cluster = {"cluster": {"server": self.url, "certificate-authority": str(self.ca_file)}, "name": "here"}
        context = {"context": {"cluster": "here", "user": "admin"}, "name": "it"}
        config = {"users": [user], "clusters": [cluster], "contexts": [context], "current-context": "it"}
        (self.folder / "config.json").write_text(json.dumps({"apiVersion": "v1", "kind": "Config"} | config))
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={self.folder / 'config.json'}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={refused_port()}",
            f"--cert-dir={self.folder / 'controllers'}",
            f"--controllers={','.join(names)}",
        )

    def kill(self) -> None:
        """As when its machine lost its power, but for the resets."""
        process = self._running.pop("kube-apiserver")
        process.kill()
        process.wait(STOP_S)

    def end(self) -> None:
        for process in reversed(self._running.values()):  # etcd last
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
        self._running.clear()

    def _start(self, name: str, *options: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [str(program(name)), *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]

    def _is_ready(self) -> bool:
        try:
            with self.asking() as client:
                return client.get("/readyz").status_code == 200
        except (httpx2.HTTPError, OSError):
            return False

    # ---- requests

    @contextmanager
    def asking(self, token: str = ADMIN) -> Iterator[httpx2.Client]:
        headers = {"authorization": f"Bearer {token}"}
        with httpx2.Client(base_url=self.url, verify=self.trust(), headers=headers, trust_env=False) as client:
            yield client

    def account(self) -> Cluster:
        """As whom a router asks."""
        return Cluster(self.url, SPACE, str(self.folder / "router-token"), str(self.ca_file))

    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca_file))

    @asynccontextmanager
    async def administrator(self) -> AsyncIterator[httpx2.AsyncClient]:
        headers = {"authorization": f"Bearer {ADMIN}"}
        async with httpx2.AsyncClient(
            base_url=self.url, verify=self.trust(), headers=headers, trust_env=False
        ) as client:
            yield client

    def version(self) -> str:
        with self.asking() as client:
            return str(checked(client.get("/version"))["gitVersion"])


class Relay:
    """A relay in front of the server: while it is closed, the server runs on without the router."""

    def __init__(self, to: int) -> None:
        self.port = refused_port()
        self._to = to
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    def close(self) -> None:
        """Refuse new connections, and reset open ones."""
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, to_server}
        await asyncio.gather(_copy(reader, to_server), _copy(from_server, writer))
        self._open -= {writer, to_server}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while some := await reader.read(2**16):
            writer.write(some)
            await writer.drain()
    writer.close()


def checked(response: httpx2.Response) -> Any:
    assert response.is_success, f"{response.request.method} {response.request.url}: {response.text}"
    return response.json()


def documented_role() -> str:
    (role,) = [each for each in re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL) if "kind: Role\n" in each]
    return str(role)


def definition(plural: str, kind: str, group: str) -> Object:
    """A definition of resources of any content. Kubernetes asks who approved a group that ends like its own."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }


def binding() -> Object:
    return {
        "metadata": {"name": "warmroute-router"},
        "subjects": [{"kind": "ServiceAccount", "name": "warmroute-router", "namespace": SPACE}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "warmroute-router"},
    }


@contextmanager
def real_api(folder: Path) -> Iterator[RealApi]:
    """With a namespace, and an account that may do what docs/discovery.md says and nothing else."""
    api = RealApi(folder)
    try:
        api.start_etcd()
        api.start()
        with api.asking() as client:
            checked(client.post("/api/v1/namespaces", json={"metadata": {"name": SPACE}}))
            yaml = {"content-type": "application/yaml"}
            checked(client.post(f"{ROLES}/roles", content=documented_role().encode(), headers=yaml))
            checked(client.post(f"{ROLES}/rolebindings", json=binding()))
        yield api
    finally:
        api.end()
