"""Random sentences for proofreading: repeatable, with places, and without code."""

from tests.docs.sentences import draw, of_docstrings, of_messages, of_page

PAGE = """# A title

A first sentence here. A second one
on two lines.

```sh
this is never a sentence of prose
```

| a cell with enough words | a second cell with words |
"""


def test_a_page_gives_sentences_with_their_lines() -> None:
    assert [(each.line, each.text) for each in of_page("page.md", PAGE)] == [
        (3, "A first sentence here."),
        (3, "A second one on two lines."),
        (10, "a cell with enough words"),
        (10, "a second cell with words"),
    ]


def test_docstrings_and_messages_are_found() -> None:
    source = '''"""One module of four words."""\nraise ValueError(f"{name} is not a known name")'''
    assert [each.text for each in of_docstrings("a.py", source)] == ["One module of four words."]
    assert [str(each) for each in of_messages("a.py", source)] == ["a.py:2: {name} is not a known name"]


def test_equal_seeds_draw_equal_sentences() -> None:
    drawn = draw(7, 12, ("pages",))
    assert drawn == draw(7, 12, ("pages",))
    assert drawn != draw(8, 12, ("pages",))
    assert len({*drawn}) == 12
