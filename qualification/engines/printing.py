"""The parts that the command lines of these programs share: a check of names, and lines of a table."""

import argparse
from collections.abc import Collection

from qualification.engines.engine import missing
from qualification.engines.judge import Tally


def check(parser: argparse.ArgumentParser, names: Collection[str], known: Collection[str], kind: str) -> None:
    """Exit with an error if a name is not known, or if there is no engine."""
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{unknown[0]!r} is no {kind}; the {kind}s are {', '.join(known)}")
    if reason := missing():
        parser.error(reason)


def show(line: str, tally: Tally) -> None:
    """Print a line of the table, and below it the first wrong predictions and why others are not called exact."""
    print(line, flush=True)
    for explanation in tally.explanations:
        print(f"    {explanation}", flush=True)
