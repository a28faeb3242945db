"""Write the tables of rows in docs/engines.md: `python -m qualification.engines.page FILE`, from the rows' results."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

from qualification.engines.explain import Kind
from qualification.engines.judge import share
from qualification.engines.results import Result, kept
from qualification.engines.rows import ROWS

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
HEADING = """\
| row | requests | called exact | of these equal | explained | not explained |
| --- | --- | --- | --- | --- | --- |
"""


def table(names: Iterable[str], results: Mapping[str, Result]) -> str:
    """One line for each of these rows that has a result."""
    return HEADING + "".join(line(results[name]) for name in names if name in results)


def line(result: Result) -> str:
    tally = result.tally
    answered = tally.requests - tally.failed
    explained = sum(count for kind, count in tally.explained.items() if kind != Kind.NONE)
    equal = share(tally.equal, tally.exact) if tally.exact else ""
    counts = f"{explained or ''} | {tally.unexplained or ''}".strip()
    return f"| {result.row} | {answered:,} | {tally.called_exact} | {equal} | {counts} |\n".replace("|  |", "| |")


def rewritten(page: str, results: Mapping[str, Result]) -> str:
    """The page with both tables between their marks written anew."""
    for kind, is_sglang in (("vllm", False), ("sglang", True)):
        begin, end = f"<!-- {kind} rows -->\n", f"<!-- /{kind} rows -->\n"
        before, found, rest = page.partition(begin)
        assert found and end in rest, f"the page lacks {begin.strip()} ... {end.strip()}"
        names = [name for name, row in ROWS.items() if row.sglang is is_sglang]
        page = before + begin + table(names, results) + end + rest.partition(end)[2]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m qualification.engines.page", description=__doc__)
    parser.add_argument(
        "results", type=Path, metavar="FILE", help="which `python -m qualification.engines --results` wrote"
    )
    args = parser.parse_args()
    PAGE.write_text(rewritten(PAGE.read_text(), kept(args.results)))


if __name__ == "__main__":
    main()
