"""The start-up check that no other package hides one of ours, which have general names."""

from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("events", "api", "engines", "kernels", "replica", "router", "fleet", "lab")
OUR_ROOT = Path(__file__).resolve().parent.parent
FIX = "Install warmroute in an environment of its own: python -m venv warmroute-env"


def hidden() -> list[str]:
    """Return an error for each of our packages that Python would import from elsewhere."""
    found = {name: spec.origin for name in PACKAGES if (spec := find_spec(name)) is not None}
    return [
        f"Error: warmroute's {name} is hidden by {origin}. {FIX}"
        for name, origin in found.items()
        if origin is not None and not Path(origin).resolve().is_relative_to(OUR_ROOT)
    ]
