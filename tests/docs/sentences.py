"""`python -m tests.docs.sentences --seed 7 --count 10`: random sentences from docs, docstrings, errors and logs.

Read them aloud, and rewrite any that a reader would have to read twice.
"""

import argparse
import ast
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.docs.pages import FENCE, ROOT, WITH_LINKS, name_of

PACKAGES = ("api", "engines", "events", "fleet", "kernels", "lab", "replica", "router")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SPEAKS = re.compile(r"debug|info|warning|error|exception|critical|echo|fail|print|.*(Error|Exception|Exit)")
KINDS = ("pages", "docstrings", "messages")
ENDS = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"(*\[])")
FEWEST_WORDS = 4


class Sentence(NamedTuple):
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def sentences(kind: str) -> Iterator[Sentence]:
    if kind == "pages":
        for page in WITH_LINKS:
            yield from of_page(name_of(page), page.read_text())
    else:
        read = of_docstrings if kind == "docstrings" else of_messages
        for package in PACKAGES:
            for path in sorted((ROOT / package).rglob("*.py")):
                yield from read(name_of(path), path.read_text())


def of_page(path: str, text: str) -> Iterator[Sentence]:
    """Yield the sentences of paragraphs, list items and table cells, without code blocks and headings."""
    without_code = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    for block in re.finditer(r"(?:^(?!\s*$|#).*(?:\n|\Z))+", without_code, re.MULTILINE):
        line = without_code.count("\n", 0, block.start()) + 1
        for part in re.split(r"(?m)^(?=\s*(?:[-*] |\d+\. |\|))", block[0]):
            cells = part.split(" | ") if part.lstrip().startswith("|") else [part]
            for cell in cells:
                yield from _split(path, line, cell.strip(" |\n-"))
            line += part.count("\n")


def of_docstrings(path: str, source: str) -> Iterator[Sentence]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield from _split(path, node.body[0].lineno, text)


def of_messages(path: str, source: str) -> Iterator[Sentence]:
    """Yield the texts of errors, log lines and printed lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and SPEAKS.fullmatch(ast.unparse(node.func).rpartition(".")[2]):
            for argument in node.args:
                if text := _text(argument):
                    yield from _split(path, argument.lineno, text)


def _text(node: ast.expr) -> str:
    """Return the text of a string or an f-string, with placeholders for values."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) for part in parts)
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, right=right):
            return _text(left) + _text(right)
    return ""


def _split(path: str, line: int, text: str) -> Iterator[Sentence]:
    for sentence in ENDS.split(text):
        words = " ".join(sentence.split())
        if len(re.findall(r"[A-Za-z]+", words)) >= FEWEST_WORDS:
            yield Sentence(path, line, words)
        line += sentence.count("\n")


def draw(seed: int, count: int, kinds: tuple[str, ...] = KINDS) -> list[Sentence]:
    """Draw `count` sentences in turn from each kind, without repeats."""
    chosen = random.Random(seed)
    piles = [sorted({*sentences(kind)}) for kind in kinds]
    for pile in piles:
        chosen.shuffle(pile)
    drawn = [pile[place] for place in range(count) for pile in piles if place < len(pile)]
    return drawn[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print random sentences of README, docs, docstrings and messages.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these; default: all")
    parser.add_argument("--all", action="store_true", help="every sentence, in order")
    wanted = parser.parse_args()
    kinds = tuple(wanted.kind or KINDS)
    for sentence in (
        [each for kind in kinds for each in sentences(kind)] if wanted.all else draw(wanted.seed, wanted.count, kinds)
    ):
        print(sentence)


if __name__ == "__main__":
    main()
