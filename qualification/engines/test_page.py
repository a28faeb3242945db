"""The tables of rows that stand in docs/engines.md."""

import re

from qualification.engines.explain import Kind
from qualification.engines.judge import Tally
from qualification.engines.page import PAGE, rewritten, table
from qualification.engines.results import Result
from qualification.engines.rows import ROWS

MARKS = "<!-- vllm rows -->\nold\n<!-- /vllm rows -->\n<!-- sglang rows -->\nold\n<!-- /sglang rows -->\n"


def result(row: str, wrong: int = 0, explained: int = 0) -> Result:
    tally = Tally(requests=1000, failed=10, exact=980, equal=980 - wrong, wrong={str(n): "" for n in range(wrong)})
    tally.explained = {Kind.LATER.value: explained, Kind.NONE.value: wrong - explained}
    return Result(row, 1000, 1, 30.0, tally)


def test_a_table_tells_which_wrong_predictions_are_explained() -> None:
    lines = table(["xxhash", "salts", "LoRA"], {"salts": result("salts"), "xxhash": result("xxhash", 3, 2)})
    assert lines.splitlines()[2:] == [
        "| xxhash | 990 | 99.0 % | 99.7 % | 2 | 1 |",
        "| salts | 990 | 99.0 % | 100.0 % | | |",
    ]


def test_a_page_gets_rows_between_the_marks_of_their_engine() -> None:
    page = rewritten(MARKS, {"salts": result("salts"), "SGLang": result("SGLang")})
    vllm, sglang = page.split("<!-- sglang rows -->")
    assert "| salts |" in vllm and "| SGLang |" not in vllm
    assert "| SGLang |" in sglang and "old" not in page


def test_the_page_names_rows_that_can_be_run() -> None:
    tables = re.findall(r"<!-- \w+ rows -->\n(.*?)<!-- /", PAGE.read_text(), re.DOTALL)
    named = [line.split(" | ")[0].strip("| ") for text in tables for line in text.splitlines()[2:]]
    assert set(named) == set(ROWS)
