"""Files of a build's context, by the rules of .dockerignore."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from qualification.images.dockerfile import ROOT


def patterns(root: Path = ROOT) -> list[str]:
    lines = (line.strip() for line in (root / ".dockerignore").read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def is_ignored(path: str, rules: Sequence[str]) -> bool:
    """The last rule that matches the path, or a folder that it lies in, decides; `!` lets in."""
    parts = path.split("/")
    above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    ignored = False
    for rule in rules:
        expression = _expression(rule.removeprefix("!"))
        if any(expression.fullmatch(each) for each in above):
            ignored = not rule.startswith("!")
    return ignored


def _expression(rule: str) -> re.Pattern[str]:
    """`**/` is any number of folders; `*`, `?` and `[...]` stay within one name, as in Go's filepath.Match."""
    parts = re.split(r"(\*\*/|\*|\?|\[[^]]*\])", rule.strip("/"))
    known = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(known.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts))


def files(root: Path = ROOT) -> Iterator[str]:
    """All that a build may copy, by path below the root."""
    rules = patterns(root)
    tops = [path for path in sorted(root.iterdir()) if not is_ignored(path.name, rules)]
    for top in tops:
        below = sorted(path for path in top.rglob("*") if path.is_file()) if top.is_dir() else [top]
        names = (path.relative_to(root).as_posix() for path in below)
        yield from (name for name in names if not is_ignored(name, rules))
