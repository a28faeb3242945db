"""A malicious fleet.toml is refused quickly and briefly, and none of it runs."""

import os
import resource
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleet.control.reconcile import Begin, Reconciler, name_stem
from fleet.host.engines import launch
from fleet.plan import FleetPlan, ModelPlan, Task, bounded
from fleet.toml.plan_file import MAX_BYTES, BadPlan, parse_fleet, read_fleet
from fleet.up.command import up as up_command

MODEL = "[[models]]\nmodel = 'demo'\n"
MAX_CPU_S = 15.0  # on a slow machine; most take some milliseconds
MAX_MEMORY_KB = 256 * 1024
MAX_WORDS = 50_000  # characters of what is said of a file

BOMBS = {
    "lists in lists": MODEL + "options = " + "[" * 400_000 + "]" * 400_000,
    "tables in tables": MODEL + "options = " + "{a=" * 50_000 + "1" + "}" * 50_000,
    "a key of 20,000 parts": MODEL + "a" + ".a" * 20_000 + " = 1",
    "a quoted key of 20,000 parts": MODEL + '"a"' + " . 'a'" * 20_000 + " = 1",
    "a table of 3,000 parts": "[a" + ".a" * 3_000 + "]\nb = 1",
    "keys in an inline table": MODEL + "options = {a" + ".a" * 20_000 + " = 1}",
    "700 keys of up to 700 parts": "\n".join("a" + ".a" * parts + f".b{parts} = 1" for parts in range(700)),
    "10,000 models": "".join(f"[[models]]\nname = 'm{number}'\nmodel = 'demo'\n" for number in range(10_000)),
    "1,000 models of one name": "[[models]]\nname = 'm'\nmodel = 'demo'\n" * 1_000,
    "50,000 unknown keys": MODEL + "".join(f"k{number} = 1\n" for number in range(50_000)),
    "50,000 unknown tables": MODEL + "".join(f"[t{number}]\n" for number in range(50_000)),
    "a key of a million letters": MODEL + "a" * 1_000_000 + " = 1",
    "an option of a million letters": MODEL + "options = {" + "a" * 1_000_000 + " = 1}",
    "an engine of a million letters": MODEL + f"engine = '{'a' * 1_000_000}'",
    "100,000 words of options": MODEL + "options = [" + "'[[',\n" * 100_000 + "]",
    "a number of a million digits": MODEL + f"replicas = {'9' * 1_000_000}",
    "a number of four million bits": MODEL + f"replicas = 0x{'f' * 1_000_000}",
    "an endless text": MODEL + "name = '''" + "x\n" * 400_000,
    "a dot between spaces": MODEL + "a" + " " * 400_000 + "." + " " * 400_000 + "\n",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_with_little_time_memory_and_words(text: str) -> None:
    began_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadPlan) as raised:
        parse_fleet("fleet.toml", text)
    assert time.process_time() - began_s < MAX_CPU_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_MEMORY_KB
    assert len(str(raised.value)) < MAX_WORDS


def test_of_many_mistakes_the_first_and_the_number_of_the_rest_are_reported() -> None:
    with pytest.raises(BadPlan) as raised:
        parse_fleet("f", MODEL + "".join(f"k{number} = 1\n" for number in range(60)))
    first, *_, last = str(raised.value).splitlines()
    assert first.startswith("f, line 3: 'k0' is not known here")
    assert last == "There are 10 more mistakes."


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
        "replicas = -1",
        "replicas = 1e300",
        "replicas = true",
        "replicas = 9223372036854775807",
        "drain_timeout = inf",
        "wedged_after = nan",
        "wedged_after = -0.0",
        "wedged_after = 1e308",
        "resources = {cpus = 1e300}",
        "resources = {gpus = -1}",
        "resources = {custom = {CPU = 1}}",
        "environment = {'A=B' = 'c'}",
        'environment = {A = "b\\u0000"}',
        "environment = ['PATH']",
        "name = ['a']",
        "name = 1979-05-27",
        "model = 7",
        "options = 'rm'",
        "options = ['--port', '1']",
        "api_key_env = 'the key itself'",
        "chat_template = '/dev/zero'",
        "tokenizer = '/proc/self'",
    ],
)
def test_a_value_of_another_kind_or_size_is_a_mistake_with_its_line(lines: str) -> None:
    text = "[[models]]\n" + ("" if lines.startswith("model") else "model = 'demo'\n") + lines
    with pytest.raises(BadPlan, match=r"^f, line \d+: "):
        parse_fleet("f", text)
