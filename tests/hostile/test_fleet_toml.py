"""A malicious fleet.toml is refused, and none of it runs."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleet.control.reconcile import Begin, Reconciler, name_stem
from fleet.host.engines import launch
from fleet.plan import FleetPlan, ModelPlan, Task, bounded
from fleet.toml.plan_file import MAX_BYTES, BadPlan, parse_fleet, read_fleet
from fleet.up.command import up as up_command


def test_a_file_without_end_is_read_only_so_far(tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match="/dev/zero is not a regular file"):
        read_fleet("/dev/zero")
    large = tmp_path / "fleet.toml"
    with large.open("wb") as file:
        os.truncate(file.fileno(), 2**40)  # a hole
    answer = CliRunner().invoke(up_command, ["--no-ray", "--config", str(large)])
    assert answer.exit_code == 2
    assert f"at most {MAX_BYTES} are read" in answer.output


NAMES = (
    *("../../etc/passwd", "; rm -rf /", "$(id)", "`id`", "a b", "..", ".", "%s%n", "'\"", "*", "~", "\U0001f600"),
    *("controller", "controller-0", "demo-0", "sim\\u0020", "a" * 100),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_single_word_and_no_path(name: str) -> None:
    plan = bounded(FleetPlan(models=(ModelPlan(name=name, model="demo"),)))
    stem = name_stem(name)
    assert stem and "/" not in stem and not stem.startswith((".", "-")) and stem.isascii()
    assert f"{stem}-0" != "controller"  # the name of another actor
    words = launch(Task(name=f"{stem}-0", plan=plan.models[0]), "127.0.0.1", "i").command
    assert words[words.index("--served-model-name") + 1] == name


def test_a_name_that_an_engine_would_take_for_an_option_is_refused() -> None:
    for name in ("-rf", "--help", "-"):
        with pytest.raises(BadPlan, match="looks like an option"):
            parse_fleet("f", f"[[models]]\nname = '{name}'\nmodel = 'demo'")
        with pytest.raises(ValueError, match="looks like an option"):
            bounded(FleetPlan(models=(ModelPlan(name=name, model="demo"),)))


def test_models_whose_replicas_have_the_same_stem_have_replicas_of_their_own() -> None:
    plan = parse_fleet("f", "".join(f"[[models]]\nname = '{name}'\nmodel = 'demo'\n" for name in ("a/b", "a-b", "a b")))
    reconciler = Reconciler()
    reconciler.want(plan)
    begun = [action.task for action in reconciler.decide() if isinstance(action, Begin)]
    assert sorted(task.name for task in begun) == ["a-b-0", "a-b-1", "a-b-2"]
    assert {task.plan.name for task in begun} == {"a/b", "a-b", "a b"}


@pytest.mark.parametrize(
    "lines",
    [
        *("replicas = -1", "replicas = 1e300", "replicas = true", "replicas = 9223372036854775807"),
        *("drain_timeout = inf", "wedged_after = nan", "wedged_after = -0.0", "wedged_after = 1e308"),
        *("resources = {cpus = 1e300}", "resources = {gpus = -1}", "resources = {custom = {CPU = 1}}"),
        *("environment = {'A=B' = 'c'}", "environment = ['PATH']", "name = ['a']", "name = 1979-05-27", "model = 7"),
        *("options = 'rm'", "options = ['--port', '1']", "options = {port = 1}", "api_key_env = 'the key itself'"),
        *("chat_template = '/dev/zero'", "tokenizer = '/proc/self'"),
    ],
)
def test_a_value_of_another_kind_or_size_is_a_mistake_with_its_line(lines: str) -> None:
    text = "[[models]]\n" + ("" if lines.startswith("model") else "model = 'demo'\n") + lines
    with pytest.raises(BadPlan, match=r"^f, line \d+: "):
        parse_fleet("f", text)
