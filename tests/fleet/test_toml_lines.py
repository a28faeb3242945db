"""Line numbers of keys in any TOML."""

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from fleet.toml.mistakes import Path, line_of

TEXT = '''\
# a comment with [brackets] and = signs
top = 1

[[models]]
name = "a # no comment" # [[models]]
options = [
  "--x", # ]
  "]",
]
[models.resources]
cpus = 1
custom."odd.name" = 2

  [[ models ]]
  'name' = """
name = "of no model"
[models]
"""
say = \'\'\'
[[models]]\'\'\'\'\'
after = {inner = {deep = 1}}
[models.autoscale]
min = 1
[router]
policy = "cost"
'''


def test_every_key_is_on_its_line() -> None:
    assert tomllib.loads(TEXT)["models"][1]["say"].endswith("''")
    assert line_of(TEXT, ("top",)) == 2
    assert line_of(TEXT, ("models", 0)) == 4
    assert line_of(TEXT, ("models", 0, "name")) == 5
    assert line_of(TEXT, ("models", 0, "options")) == 6
    assert line_of(TEXT, ("models", 0, "resources")) == 10
    assert line_of(TEXT, ("models", 0, "resources", "custom", "odd.name")) == 12
    assert line_of(TEXT, ("models", 1)) == 14
    assert line_of(TEXT, ("models", 1, "name")) == 15
    assert line_of(TEXT, ("models", 1, "say")) == 19
    assert line_of(TEXT, ("models", 1, "after")) == 21
    assert line_of(TEXT, ("models", 1, "autoscale", "min")) == 23
    assert line_of(TEXT, ("router", "policy")) == 25


VALUES = st.sampled_from(
    [
        *('"x"', "'#'", '"\\" ] #"', '"""\n[no]\nheading = 1\n"""', "'''\n]\n'''", "[\n 1, # ]\n 2,\n]"),
        *("{a = [1, 2], b = '}'}", "[\n[1],\n[2]\n]", "1979-05-27T07:32:00Z", "true # = [", '"""a""""'),
    ]
)
BETWEEN = st.sampled_from(["", "\n", "# [x]\n", "  \n\n"])


@given(st.lists(st.tuples(BETWEEN, st.sampled_from(["key", "[table]", "[[list]]"]), VALUES)))
def test_the_line_of_each_statement_is_where_it_was_written(statements: list[tuple[str, str, str]]) -> None:
    text, count = "", 0
    where: Path = ()
    expected: dict[Path, int] = {}
    for number, (between, kind, value) in enumerate(statements):
        text += between
        line = text.count("\n") + 1
        if kind == "key":
            expected[(*where, f"k{number}")] = line
            text += f"k{number} = {value}\n"
            continue
        where = (f"t{number}",) if kind == "[table]" else ("list", count)
        count += kind == "[[list]]"
        expected[where] = line
        text += f"[t{number}]\n" if kind == "[table]" else "[[list]]\n"
    tomllib.loads(text)
    assert {path: line_of(text, path) for path in expected} == expected
