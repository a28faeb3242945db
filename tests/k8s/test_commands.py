"""Command lines of ours in manifests are what commands take: options, values, variables."""

import re

import click
import pytest

from tests.k8s.commands import Line, all_lines, known_variables, values_of, variables
from tests.k8s.rendered import ON_RAY, VARIANTS, pods, rendered


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_command_line_of_ours_can_be_parsed(variant: str) -> None:
    found = all_lines(variant)
    assert {line.words[0] for _, line in found} >= {"router", "fetch"}
    for _, line in found:
        assert line.values(), line


@pytest.mark.parametrize("variant", ON_RAY)
def test_a_fleet_is_kept_and_its_nodes_are_drained(variant: str) -> None:
    up, drain = values_of(variant, "up"), values_of(variant, "drain")
    assert (up["follow"], up["router"], up["controller_port"]) == (True, False, 8790)
    assert (drain["node"], drain["wait_s"]) == ("10.0.0.7", 120.0)


@pytest.mark.parametrize(
    "words",
    [
        ("router", "--drain-delays=10"),
        ("router", "--port=http"),
        ("router", "--drain-timeout=-1"),
        ("replica", "--modell=demo"),
        ("fetch",),
        ("fetch", "demo", "/models", "/more"),
        ("up", "--follows"),
        ("drain", "--wait=soon"),
    ],
)
def test_a_line_that_a_command_would_refuse_is_found(words: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError):
        Line("planted", words).values()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variable_of_ours_is_read(variant: str) -> None:
    known = known_variables()
    for pod in pods(rendered(variant)):
        for each in pod.containers:
            given = {name for name in variables(each) if name.startswith("WARMROUTE_")}
            assert given <= known, (pod.owner, given - known)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_secret_stands_on_a_command_line(variant: str) -> None:
    for _, line in all_lines(variant):
        assert not any(re.match(r"--(api|admin|fleet|replica-api)-key\b(?!s)", word) for word in line.words)
