"""The pages of the documentation, and the commands that they have their readers run."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_LINKS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("sh", "bash", "shell")
PRINTS_THE_SAME = re.compile(r"warmroute (.*--help|size .*)")  # on every machine: compared word by word


class Command(NamedTuple):
    """A command of a page, with the output that the page shows below its block."""

    line: str
    shown: str = ""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    return FENCE.findall(text)


def commands_of(text: str) -> Iterator[Command]:
    """Yield the commands of the shell, console and Python blocks in the order of the page."""
    found = blocks(text)
    for place, (language, content) in enumerate(found):
        if language in SHELL:
            lines = list(split(content))
            follows = found[place + 1] if place + 1 < len(found) else ("", "")
            shown = follows[1] if follows[0] == "text" else ""
            yield from (Command(line) for line in lines[:-1])
            yield Command(lines[-1], shown)
        elif language == "console":
            for run in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
                line, _, shown = run.partition("\n")
                yield Command(line, shown)
        elif language == "python":
            yield Command(f"python - <<'END'\n{content}END")


def split(block: str) -> Iterator[str]:
    """Yield the commands of a shell block, each with all of its lines."""
    command = ""
    for line in block.splitlines():
        command += line + "\n"
        if command.strip() and not line.endswith("\\") and is_complete(command):
            yield command.strip()
            command = ""
    assert not command.strip(), f"unterminated code block: {block}"


def is_complete(command: str) -> bool:
    return subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False).returncode == 0


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} (.+)$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 0
        while anchor in found:
            number += 1
            anchor = f"{slug}-{number}"
        found.add(anchor)
    return found
