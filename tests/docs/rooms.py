"""`python -m tests.docs.rooms`: write the rooms of each package, from the ground up, in docs/architecture.md."""

import ast
import re

from tests.docs.parts import Part
from tests.house import PACKAGES, ROOT, floors, modules, reach, rooms

PART = Part("architecture.md", "rooms")


def plan() -> str:
    return "\n".join(map(_of_package, PACKAGES))


def _of_package(package: str) -> str:
    found = floors(reach(rooms(modules(ROOT / package))))
    ordered = sorted(found, key=lambda room: (found[room], room))
    rows = (f"| {found[room]} | `{room}` | {_says(package, room)} |" for room in ordered if room != "__main__")
    return "\n".join([f"### {package}/", "", "| floor | room | |", "| --- | --- | --- |", *rows, ""])


def _says(package: str, room: str) -> str:
    path = ROOT / package / room
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    said = ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None
    assert said, f"{package}/{room} does not say what it is: begin {file.relative_to(ROOT)} with a sentence"
    [sentence, *_] = re.split(r"(?<=\.)\s+(?=[A-Z])|\n\n", said)
    return " ".join(sentence.split())


if __name__ == "__main__":
    PART.write(plan())
