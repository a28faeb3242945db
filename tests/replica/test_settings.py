"""Where a setting's value comes from, and what configuration it makes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from replica.config import ReplicaConfig
from replica.options import SettingsCommand
from replica.settings import ALL, Setting, config_from

BASE = ("--model", "demo", "--engine", "simulated")
# Fields that several settings make together, and what the tokenizer says.
DERIVED = {
    "engine.model",
    "engine.num_blocks",
    "engine.events",
    "engine.replay",
    "engine.status",
    "engine.snapshot",
    "engine.eos_token_ids",
    "engine.vocabulary",
    "tokenizer",
}
OTHER_VALUES = {"text": "x", "model": "x", "integer range": 7, "float range": 0.5, "boolean": False}


def run(*arguments: str, environment: dict[str, str] | None = None, base: tuple[str, ...] = BASE) -> Result:
    """Run a command that prints its configuration."""

    @click.command(cls=SettingsCommand)
    @click.pass_context
    def show(ctx: click.Context, /, **_: object) -> None:
        click.echo(msgspec.json.encode(config_from(ctx)))

    return CliRunner().invoke(show, [*base, *arguments], env=environment)


def config(*arguments: str, environment: dict[str, str] | None = None, base: tuple[str, ...] = BASE) -> ReplicaConfig:
    result = run(*arguments, environment=environment, base=base)
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout, type=ReplicaConfig)


def error(*arguments: str, environment: dict[str, str] | None = None, base: tuple[str, ...] = BASE) -> str:
    result = run(*arguments, environment=environment, base=base)
    assert result.exit_code == 2, result.output
    return result.stderr


def leaves(kind: type[msgspec.Struct], path: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from leaves(field.type, f"{path}{field.name}.")
        else:
            yield path + field.name


def at(configuration: ReplicaConfig, field: str) -> Any:
    value: Any = configuration
    for name in field.split("."):
        value = getattr(value, name)
    return value


def test_every_field_has_a_setting() -> None:
    fields = {setting.field for setting in ALL.values() if setting.field}
    assert fields | DERIVED | {"engine.num_blocks"} == set(leaves(ReplicaConfig))


def test_without_settings_the_configuration_has_its_own_defaults() -> None:
    own = msgspec.to_builtins(ReplicaConfig(engine=config().engine))
    assert msgspec.to_builtins(config()) == own
    assert config(base=("--model", "m", "--engine", "simulated")).engine.model == "m"


def other_value(setting: Setting, folder: Path) -> Any:
    """A value that is not the default."""
    if isinstance(setting.type, click.Choice):
        return setting.type.choices[-1]
    if isinstance(setting.type, click.Path):
        (folder / "file").touch()
        return str(folder / "file" if setting.type.dir_okay is False else folder)
    if setting.type is click.BOOL:
        return setting.key not in ("enable_prefix_caching", "events")
    if setting.key == "max_num_batched_tokens":
        return 700  # no less than --max-num-seqs
    return OTHER_VALUES[setting.type.name]


def toml(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


@pytest.mark.parametrize("setting", [s for s in ALL.values() if s.field], ids=lambda s: s.key)
def test_a_setting_arrives_by_flag_environment_and_file(setting: Setting, tmp_path: Path) -> None:
    value = other_value(setting, tmp_path)
    flag = [setting.option, str(value)]
    if setting.type is click.BOOL:
        flag = [setting.option if value else f"--no-{setting.option[2:]}"]
    (tmp_path / "c.toml").write_text(f"{setting.key} = {toml(value)}")
    base: tuple[str, ...] = BASE if setting.key != "engine" else BASE[:2]
    if setting.key == "curve_clients":
        (tmp_path / "secret").touch()
        base += ("--curve-secret", str(tmp_path / "secret"))
    assert at(config(*flag, base=base), setting.field) == value
    assert at(config(environment={setting.variable: str(value)}, base=base), setting.field) == value
    assert at(config("--config", str(tmp_path / "c.toml"), base=base), setting.field) == value


def test_the_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("max_num_seqs = 3\nblock_size = 3\nport = 3\n")
    environment = {"WARMROUTE_CONFIG": str(tmp_path / "c.toml"), "WARMROUTE_MAX_NUM_SEQS": "2", "WARMROUTE_PORT": "2"}
    made = config("--port", "1", environment=environment)
    assert (made.port, made.engine.max_num_seqs, made.engine.block_size) == (1, 2, 3)


def test_the_native_engine_is_refused_in_one_line() -> None:
    assert error(base=("--model", "demo")) == (
        "Error: the native engine is not part of this version; use --engine simulated\n"
    )


def test_the_model_has_to_be_named() -> None:
    assert "Missing option '--model'" in error(base=())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--port", "70000"), "'--port': 70000 is not in the range"),
        (("--block-size", "0"), "'--block-size': 0 is not"),
        (("--simulated-decode-tokens-per-s", "0"), "'--simulated-decode-tokens-per-s': 0.0 is not"),
        (("--simulated-step-overhead", "nan"), "nan is not a finite number"),
        (("--drain-timeout", "inf"), "inf is not a finite number"),
        (("--log-level", "loud"), "'loud' is not one of"),
        (("--engine", "guessing"), "'guessing' is not one of"),
        (("--api-key", ""), "'--api-key': '' is empty"),
        (("--served-model-name", "d\udcc3"), "is not UTF-8"),
        (("--chat-template", "nowhere.jinja"), "'nowhere.jinja' does not exist"),
        (("--tokenizer", "."), "--tokenizer .: tokenizer.json does not exist"),
        (("--curve-clients", "."), "give --curve-secret too"),
        (("--max-waiting", "0"), "'--max-waiting': 0 is not"),
        (("--model", "./nowhere"), "'--model': './nowhere' is no folder"),
        (("--model", "/nowhere"), "'/nowhere' is no folder; name one that exists"),
        (("--model", "some/model/"), "'some/model/' is no folder"),
        (("--model", "data/some/model"), "'data/some/model' is no folder"),
        (("--max-num-batched-tokens", "64"), "64 is less than --max-num-seqs 256"),
        (("--max-num-seqs", "4096"), "--max-num-batched-tokens 2048 is less than --max-num-seqs 4096"),
        (("--kv-cache-gb", "0.001"), "--kv-cache-gb 0.001 holds no block of 2,097,152 bytes"),
    ],
)
def test_a_value_out_of_range_is_quoted_with_its_option(arguments: tuple[str, ...], named: str) -> None:
    assert named in error(*arguments)


def test_an_error_in_the_environment_names_the_variable() -> None:
    # What Kubernetes sets for a service of the name warmroute.
    said = error(environment={"WARMROUTE_PORT": "tcp://10.0.0.1:80"})
    assert "Invalid value for WARMROUTE_PORT in the environment (--port): 'tcp://10.0.0.1:80'" in said


@pytest.mark.parametrize("variable", ["WARMROUTE_API_KEY", "WARMROUTE_CURVE_SECRET", "WARMROUTE_CONFIG"])
def test_an_empty_variable_is_not_taken_for_none(variable: str) -> None:
    assert error(environment={variable: ""}) == (
        f"Error: {variable} in the environment is empty; give it a value, or unset it\n"
    )


def test_a_step_may_be_as_small_as_the_batch() -> None:
    assert config("--max-num-batched-tokens", "8", "--max-num-seqs", "8").engine.max_num_seqs == 8


def test_a_name_with_one_slash_is_a_name() -> None:
    assert config(base=("--model", "some/model", "--engine", "simulated")).engine.model == "some/model"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("block_size = 16\nport = 70000", "Invalid value for port in c.toml, line 2: 70000 is not in the range"),
        ('\n\n# note\nport = "8001"', "c.toml, line 4: port is '8001'; write a whole number"),
        ("port = true", "c.toml, line 1: port is True; write a whole number"),
        ("port = 80.5", "c.toml, line 1: port is 80.5; write a whole number"),
        ("drain_timeout = '1'", "c.toml, line 1: drain_timeout is '1'; write a number"),
        ("events = 1", "c.toml, line 1: events is 1; write true or false"),
        ("api_key = 5", "c.toml, line 1: api_key is no text; write text in quotes"),
        ("max_nun_seqs = 1", "c.toml, line 1: 'max_nun_seqs' is no setting; did you mean 'max_num_seqs'?"),
        ("max-num-seqs = 1", "c.toml, line 1: 'max-num-seqs' is no setting; did you mean 'max_num_seqs'?"),
        ("zzz = 1", "'zzz' is no setting; `warmroute replica --help` lists the settings"),
        ("a = 1\n[simulated]\nx = 1", "'a' is no setting"),
        ("[port]\nx = 1", "c.toml, line 1: port is {'x': 1}; write a whole number"),
        ("port = ", "c.toml is not TOML: Invalid value (at"),
    ],
)
def test_an_error_in_the_file_names_file_key_and_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(text)
    assert said in error("--config", "c.toml")


def test_an_api_key_in_the_file_is_never_quoted(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("api_key = 123456789")
    assert "123456789" not in error("--config", str(tmp_path / "c.toml"))


@pytest.mark.parametrize("content", [None, b"\xff\xfe", "folder"])
def test_a_file_that_cannot_be_read_is_named(content: bytes | str | None, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.mkdir()
    assert f"--config: cannot read {str(path)!r}: " in error("--config", str(path))


def test_memory_is_divided_into_blocks() -> None:
    assert config("--kv-cache-gb", "1").engine.num_blocks == 10**9 // (16 * 131072)
    assert config("--kv-cache-gb", "1", "--kv-bytes-per-token", "1000", "--block-size", "10").engine.num_blocks == 10**5


def test_memory_and_number_contradict_each_other_only_in_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("kv_cache_gb = 1.0\n")
    assert "give one of them" in error("--num-blocks", "5", "--kv-cache-gb", "1")
    assert config("--num-blocks", "5", "--config", str(tmp_path / "c.toml")).engine.num_blocks == 5
    memory = config("--kv-cache-gb", "1", environment={"WARMROUTE_NUM_BLOCKS": "5"}).engine.num_blocks
    assert memory == 10**9 // (16 * 131072)


@pytest.mark.parametrize(
    ("arguments", "ports"),
    [((), (5557, 5558, 5559, 5560)), (("--events-port", "7000"), (7000, 7001, 7002, 7003))],
)
def test_the_event_sockets_take_four_ports_in_a_row(arguments: tuple[str, ...], ports: tuple[int, ...]) -> None:
    engine = config(*arguments).engine
    ends = (engine.events, engine.replay, engine.status, engine.snapshot)
    assert ends == tuple(f"tcp://127.0.0.1:{port}" for port in ports)


def test_event_sockets_can_be_anywhere_or_nowhere() -> None:
    assert config("--events-port", "0").engine.replay == "tcp://127.0.0.1:0"
    assert config("--events-host", "::1").engine.events == "tcp://[::1]:5557"
    off = config("--no-events").engine
    assert (off.events, off.replay, off.status, off.snapshot) == (None, None, None, None)


def test_a_name_needs_no_tokenizer() -> None:
    made = config()
    assert made.tokenizer is None
    assert made.engine.vocabulary == (0, 256)
    assert made.engine.eos_token_ids == (257, 259)


@pytest.fixture
def model(tmp_path: Path) -> str:
    vocabulary = {"[UNK]": 0, "a": 1, "</s>": 2}
    Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    return str(tmp_path)


def test_a_model_folder_brings_its_tokenizer(model: str) -> None:
    made = config(base=("--model", model, "--engine", "simulated"))
    assert (made.tokenizer, made.engine.model) == (model, model)
    assert (made.engine.vocabulary, made.engine.eos_token_ids) == ((0, 3), (2,))


def test_name_and_tokenizer_can_be_given_apart(model: str) -> None:
    made = config("--served-model-name", "mine", "--tokenizer", f"{model}/tokenizer.json")
    assert (made.engine.model, made.tokenizer) == ("mine", f"{model}/tokenizer.json")


def test_the_file_in_the_docs_is_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "replica.md").read_text()
    (tmp_path / "c.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    made = config("--config", str(tmp_path / "c.toml"), base=())
    assert (made.engine.num_blocks, made.engine.max_model_len) == (9_536, 16_384)


def test_help_shows_every_setting_in_its_group() -> None:
    shown = run("--help").output
    assert all(f"  {setting.option}" in shown for setting in ALL.values())
    assert shown.index("Cache:") < shown.index("--num-blocks") < shown.index("Events:") < shown.index("--events-port")
