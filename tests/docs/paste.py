"""`python -m tests.docs.paste`: update the help texts and the output of `warmroute size` in the pages."""

import re

from tests.docs.pages import PAGES, PRINTS_THE_SAME, name_of
from tests.docs.test_pages import CONSOLE, real_output

RUN = re.compile(r"^\$ (.*)\n(?:(?!\$ ).*\n)*", re.MULTILINE)


def pasted_anew(page: str) -> str:
    """The page with every run that prints the same everywhere as it prints now."""
    return CONSOLE.sub(lambda block: RUN.sub(_run, block[0]), page)


def _run(run: re.Match[str]) -> str:
    if not PRINTS_THE_SAME.fullmatch(run[1]):
        return run[0]
    return f"$ {run[1]}\n{real_output(run[1]).strip()}\n" + ("```\n" if run[0].endswith("```\n") else "")


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text()
        after = pasted_anew(before)
        if after != before:
            page.write_text(after)
            print(name_of(page))
