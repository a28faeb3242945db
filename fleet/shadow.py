"""The start-up check that no other package goes by the name of one of ours.

Our packages have general names, so another distribution may bring an `events` or a `kernels` of its own. The check
lists the folders of sys.path once; it reads installed metadata only when a conflict was found.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGES = ("events", "api", "engines", "kernels", "replica", "router", "fleet", "lab")
OUR_ROOT = Path(__file__).resolve().parent.parent
FIX = "Install warmroute in an environment of its own: python -m venv warmroute-env"


@dataclass(frozen=True)
class Conflict:
    """A package of another distribution with the name of one of ours."""

    name: str
    other_root: str
    ours_wins: bool

    def describe(self, owners: Sequence[str], our_root: Path = OUR_ROOT) -> str:
        if self.other_root == str(our_root):
            theirs = f"that of {', '.join(owners)}"
            return f"warmroute's {self.name} and {theirs} lie mixed in one folder, {our_root / self.name}. {FIX}"
        other = f"{self.name} in {self.other_root}"
        if owners:
            other += f" (installed by {', '.join(owners)})"
        relation = "hides" if self.ours_wins else "is hidden by"
        return f"warmroute's {self.name} {relation} {other}. {FIX}"


def find_conflicts(search_path: Iterable[str], our_root: Path = OUR_ROOT) -> list[Conflict]:
    """Compare every folder of the search path with our names, in the order in which Python imports."""
    ours, conflicts, ours_seen = str(our_root), [], False
    for root in dict.fromkeys(os.path.realpath(folder) for folder in search_path):
        if root == ours:
            ours_seen = True
            names = _same_named_distributions(root)
        else:
            names = _packages_in(root)
        if root != ours and "fleet" in names and os.path.exists(os.path.join(root, "fleet", "shadow.py")):
            continue  # another copy of warmroute: complete, so its packages never mix with ours
        conflicts += [Conflict(name, root, ours_seen) for name in names]
    return conflicts


def owners_of(name: str) -> list[str]:
    """Name the installed distributions, other than ours, that bring a top-level package of this name."""
    from importlib.metadata import packages_distributions

    return sorted(set(packages_distributions().get(name, ())) - {"warmroute"})


def check() -> tuple[list[str], list[str]]:
    """Return warnings and errors."""
    warnings: list[str] = []
    errors: list[str] = []
    for conflict in find_conflicts(sys.path):
        owners = owners_of(conflict.name)
        if conflict.other_root == str(OUR_ROOT) and not owners:
            continue  # a distribution of that name which brings no package of that name
        (warnings if conflict.ours_wins else errors).append(conflict.describe(owners))
    return warnings, errors


def _packages_in(root: str) -> list[str]:
    """Find the importable modules of our names; a folder without `__init__` never wins over a package."""
    specs = {name: PathFinder.find_spec(name, [root]) for name in PACKAGES}
    return [name for name, spec in specs.items() if spec is not None and spec.loader is not None]


_DIST_INFO = re.compile(rf"({'|'.join(PACKAGES)})-[^-]*\.(?:dist|egg)-info", re.IGNORECASE)


def _same_named_distributions(root: str) -> list[str]:
    """Find distributions named like our packages in our own folder, where two packages would mix their files."""
    return sorted({match[1].lower() for entry in os.listdir(root) if (match := _DIST_INFO.fullmatch(entry))})
