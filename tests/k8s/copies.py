"""Copies of monitoring/ in k8s/: kustomize reads nothing outside of its own folders, and cannot lift rules into a spec.

`python -m tests.k8s.copies` writes them; a test compares.
"""

from pathlib import Path

from tests.k8s.rendered import K8S, ROOT

MONITORING = ROOT / "monitoring"
COMPONENT = K8S / "components" / "monitoring"

RULES = """\
# Written by `python -m tests.k8s.copies` from monitoring/alerts.yaml: change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: warmroute
  namespace: warmroute
  labels: {app.kubernetes.io/name: warmroute}
spec:
"""


def copies() -> dict[Path, str]:
    """Every copied file, and its expected content."""
    return {
        COMPONENT / "rules.yaml": RULES + indented((MONITORING / "alerts.yaml").read_text()),
        COMPONENT / "warmroute.json": (MONITORING / "grafana.json").read_text(),
    }


def indented(text: str) -> str:
    return "".join(f"  {line}" if line.strip() else line for line in text.splitlines(keepends=True))


if __name__ == "__main__":
    for path, text in copies().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
