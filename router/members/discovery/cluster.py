"""The address of the Kubernetes API server and the service account's credentials."""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Cluster(Struct, frozen=True):
    url: str
    namespace: str
    token_file: str | None = None  # read for each request: Kubernetes renews it every hour
    ca_file: str | None = None


def in_cluster(environment: Mapping[str, str], namespace: str | None = None, folder: Path = ACCOUNT_FOLDER) -> Cluster:
    """The cluster of this pod; raise ValueError outside a pod with a service account."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    token, authority, own = folder / "token", folder / "ca.crt", folder / "namespace"
    if not host or not token.is_file():
        raise ValueError(
            "this process has no pod service account; give the API server, "
            "for example of `kubectl proxy`: --kubernetes-api http://127.0.0.1:8001"
        )
    host = f"[{host}]" if ":" in host else host
    if namespace is None:
        namespace = own.read_text().strip() if own.is_file() else "default"
    return Cluster(f"https://{host}:{port}", namespace, str(token), str(authority) if authority.is_file() else None)
