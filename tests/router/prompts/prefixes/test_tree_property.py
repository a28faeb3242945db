"""The tree of what prompts share, against looking at every beginning of every prompt."""

from hypothesis import given
from hypothesis import strategies as st

from router.prompts.prefixes.tree import Run, Tree, most_shared

# Few keys, so that prompts share a lot; long runs are made of repetitions.
KEYS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), max_size=4).map(
    lambda parts: [10 * key + place for key, count in parts for place in range(count)]
)
TEXT = st.none() | st.lists(st.sampled_from([b"a", b"bb", b"\0user\0"]), max_size=4).map(b"".join)
PROMPTS = st.lists(st.tuples(KEYS, TEXT), max_size=12)


def tree_of(prompts: list[tuple[list[int], bytes | None]]) -> Tree:
    tree = Tree()
    for number, (keys, text) in enumerate(prompts):
        tree.add(keys, float(number), text)
    return tree


def keys_of(run: Run) -> tuple[int, ...]:
    return tuple(key for each in run.path() for key in each.keys)


def beginning(texts: list[bytes]) -> bytes:
    return next(
        texts[0][:length]
        for length in range(len(texts[0]), -1, -1)
        if all(text.startswith(texts[0][:length]) for text in texts)
    )


@given(PROMPTS)
def test_runs_end_where_prompts_end_or_continue_differently(prompts: list[tuple[list[int], bytes | None]]) -> None:
    tree = tree_of(prompts)
    tree.check()
    wanted = set()
    for keys, _ in prompts:
        for length in range(1, len(keys) + 1):
            beginning = keys[:length]
            going_on = {tuple(other[: length + 1]) for other, _ in prompts if other[:length] == beginning}
            if len(going_on) > 1 or going_on == {tuple(beginning)}:
                wanted.add(tuple(beginning))
    assert {keys_of(run) for run in tree.runs()} == wanted


@given(PROMPTS)
def test_a_run_knows_the_prompts_that_have_it(prompts: list[tuple[list[int], bytes | None]]) -> None:
    for run in tree_of(prompts).runs():
        path = list(keys_of(run))
        having = [(number, text) for number, (keys, text) in enumerate(prompts) if keys[: len(path)] == path]
        texts = [text for _, text in having if text is not None]
        if len(texts) < len(having):
            assert run.text is None
            continue
        assert run.prompts == len(having)
        assert run.last_s == max(number for number, _ in having)
        assert run.text == beginning(texts)


@given(PROMPTS, st.integers(1, 8))
def test_those_that_save_most_are_chosen_with_what_they_come_after(
    prompts: list[tuple[list[int], bytes | None]], limit: int
) -> None:
    tree = tree_of(prompts)
    chosen = most_shared({tree: 16}, limit)
    assert len(chosen) <= limit and len({id(run) for run in chosen}) == len(chosen)
    for place, run in enumerate(chosen):
        assert run.prompts > 1
        assert all(each in chosen[: place + 1] for each in run.path())
    shared = [run for run in tree.runs() if run.prompts > 1]
    if len(shared) <= limit:
        assert len(chosen) == len(shared)
    elif shared:
        saved = [(run.prompts - 1) * len(run.keys) for run in shared]
        best = shared[saved.index(max(saved))]
        assert len(best.path()) > limit or max(saved) in [(run.prompts - 1) * len(run.keys) for run in chosen]


def test_what_saves_most_counts_in_tokens() -> None:
    small, large = tree_of([([1, 2, 3], None)] * 2), tree_of([([7], None)] * 2)
    [run] = most_shared({small: 16, large: 64}, 1)
    assert run.keys == [7]
