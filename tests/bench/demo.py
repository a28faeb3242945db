"""Write what `warmroute demo` prints, with a fleet of its own, below docs/chat.md, and draw it as docs/demo.svg."""

import io
import subprocess
import sys

from rich.console import Console

from tests.bench.__main__ import machine
from tests.bench.terminal import DOCS, FONTS

PAGE, PICTURE = DOCS / "chat.md", DOCS / "demo.svg"
MARK = "<!-- all below is written by `python -m tests.bench demo` -->\n"


def run(rounds: int) -> None:
    del rounds  # it is a picture, and no figure
    said = subprocess.run([sys.executable, "-m", "fleet", "demo"], check=True, stdout=subprocess.PIPE, text=True).stdout
    above, _, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{above}{MARK}\nOn {machine()}:\n\n```text\n$ warmroute demo\n{said}```\n")
    console = Console(record=True, width=100, file=io.StringIO(), highlight=False)
    console.print(said, markup=False)
    PICTURE.write_text(FONTS.sub("", console.export_svg(title="warmroute demo")).replace("Fira Code, ", ""))
    print(f"{PAGE} has a new end, and {PICTURE} is drawn")
