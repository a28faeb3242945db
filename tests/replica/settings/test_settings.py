"""Sources of a setting's value, and the resulting configuration."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from api.process.options import SettingsCommand
from api.process.settings import Setting
from replica.config import AnswerRule, ReplicaConfig
from replica.settings.configure import config_from
from replica.settings.options import ALL, TABLE
from tests.replica.folders import FP32_TOKEN, model_folder

BASE = ("--model", "demo", "--engine", "simulated")
# Fields derived from several settings, from the tokenizer or from the model.
OF_ENGINE = (
    *("model", "model_path", "dtype", "max_model_len", "max_step_s", "num_blocks", "host_blocks", "disk_blocks"),
    *("disk_kv", "events", "kv_read", "lora_modules", "replay", "status", "snapshot", "eos_token_ids", "vocabulary"),
)
DERIVED = {"simulated_answers", "tokenizer", *(f"engine.{name}" for name in OF_ENGINE)}
OTHER_VALUES = {"text": "x", "model": "x", "integer range": 7, "float range": 0.5, "boolean": False}


def run(*arguments: str, environment: dict[str, str] | None = None, base: tuple[str, ...] = BASE) -> Result:
    """Run a command that prints its configuration."""

    @click.command(cls=SettingsCommand, table=TABLE)
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
    assert fields | DERIVED == set(leaves(ReplicaConfig))
    assert fields.isdisjoint(DERIVED)


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
        return setting.key not in ("enable_prefix_caching", "events", "partial_reuse")
    if setting.key == "max_num_batched_tokens":
        return 700  # no less than --max-num-seqs
    if setting.key == "kv_secret":
        return "a secret of the fleet"
    if setting.key == "max_bodies_bytes":
        return 2**40  # room for two of the largest
    return OTHER_VALUES[setting.type.name]


def toml(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


@pytest.mark.parametrize("setting", [s for s in ALL.values() if s.field], ids=lambda s: s.key)
def test_a_setting_arrives_by_flag_environment_and_file(setting: Setting, tmp_path: Path) -> None:
    value = other_value(setting, tmp_path)
    flag = [f"{setting.option}={str(value).lower() if setting.type is click.BOOL else value}"]
    if setting.type is click.BOOL and setting.flag:
        flag = [setting.option if value else f"--no-{setting.option[2:]}"]
    (tmp_path / "c.toml").write_text(f"{setting.key} = {toml(value)}")
    base: tuple[str, ...] = BASE if setting.key != "engine" else ("--model", model_folder(tmp_path))
    if setting.key in ("curve_clients", "curve_any_client"):
        (tmp_path / "secret").touch()
        base += ("--curve-secret", str(tmp_path / "secret"))
    if setting.key == "curve_secret":
        base += ("--set=curve_any_client=true",)
    assert at(config(*flag, base=base), setting.field) == value
    assert at(config(environment={setting.variable: str(value)}, base=base), setting.field) == value
    assert at(config("--config", str(tmp_path / "c.toml"), base=base), setting.field) == value


def test_the_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("max_num_seqs = 3\nblock_size = 3\nport = 3\n")
    environment = {"WARMROUTE_CONFIG": str(tmp_path / "c.toml"), "WARMROUTE_MAX_NUM_SEQS": "2", "WARMROUTE_PORT": "2"}
    made = config("--port", "1", environment=environment)
    assert (made.port, made.engine.max_num_seqs, made.engine.block_size) == (1, 2, 3)


@pytest.mark.parametrize(
    ("options", "endpoint"),
    [
        ((), "tcp://127.0.0.1:5556"),
        (("--kv-host", "*", "--kv-port", "0"), "tcp://*:0"),
        (("--kv-host", "::1", "--kv-port", "7"), "tcp://[::1]:7"),
    ],
)
def test_neighbours_read_blocks_only_with_a_secret(options: tuple[str, ...], endpoint: str) -> None:
    assert config(*options).engine.kv_read is None
    assert config(*options, environment={"WARMROUTE_KV_SECRET": "x" * 16}).engine.kv_read == endpoint


def test_the_answers_of_a_simulated_engine_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    file.write_text('{"text": "Hi", "last": "é"}\n\n{"text": "x", "tool": "write", "tool_results": 1}\n')
    rules = (AnswerRule(text="Hi", last="é"), AnswerRule(text="x", tool="write", tool_results=1))
    assert config("--simulated-answers", str(file)).simulated_answers == rules


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("Hi", "JSON is malformed"),
        ("{}", "missing required field `text`"),
        ('{"text": ""}', "`str` of length >= 1"),
        ('{"text": "x", "tools": "y"}', "unknown field `tools`"),
        ('{"text": "x", "tool_results": -1}', "`int` >= 0"),
        ('{"text": ' + "[" * 100_000, "Expected `str`, got `array`"),
        ("\n" * 2**20, "are read; is it the right file?"),
    ],
)
def test_a_line_that_is_no_rule_is_named(tmp_path: Path, line: str, named: str) -> None:
    file = tmp_path / "answers"
    file.write_text('{"text": "x"}\n' + line)
    assert named in (told := error("--simulated-answers", str(file)))
    assert "answers, line 2" in told or "right file" in told


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--port", "70000"), "'--port': 70000 is not in the range"),
        (("--block-size", "0"), "'--block-size': 0 is not"),
        (("--set=simulated_decode_tokens_per_s=0",), "'--set=simulated_decode_tokens_per_s': 0.0 is not"),
        (("--set=simulated_step_overhead=nan",), "nan is not a finite number"),
        (("--drain-timeout", "inf"), "inf is not a finite number"),
        (("--log-level", "loud"), "'loud' is not one of"),
        (("--engine", "guessing"), "'guessing' is not one of"),
        (("--api-key", ""), "'--api-key': '' is empty"),
        (("--served-model-name", "d\udcc3"), "is not UTF-8"),
        (("--chat-template", "nowhere.jinja"), "'nowhere.jinja' does not exist"),
        (("--tokenizer", "."), "--tokenizer .: tokenizer.json does not exist"),
        (("--curve-clients", "."), "give --curve-secret too"),
        (("--set=curve_any_client=true",), "curve_any_client needs an encryption key; give --curve-secret too"),
        (("--curve-secret", __file__, "--curve-clients", ".", "--set=curve_any_client=true"), "give one of them"),
        (("--kv-secret", "short"), "--kv-secret has 5 characters, which a stranger could guess"),
        (("--kv-secret", "x" * 16, "--kv-host", "a b"), "--kv-host a b is no address"),
        (("--set=max_waiting=0",), "'--set=max_waiting': 0 is not"),
        (("--threads", "0"), "'--threads': 0 is not"),
        (("--threads", "100000000000"), "100000000000 is not in the range 1<=x<=1024"),
        (("--max-model-len", "1"), "'--max-model-len': 1 is not in the range 2<=x"),
        (("--num-blocks", "9" * 30), f"{'9' * 30} is not in the range 1<=x<=2147483647"),
        (("--max-num-seqs", str(2**31)), "2147483648 is not in the range"),
        ((f"--set=simulated_mean_output_tokens={2**31}",), "2147483648 is not in the range"),
        (("--kv-cache-gb", "1e300"), "'--kv-cache-gb': 1e+300 is not in the range"),
        (("--kv-cache-gb", "1e9", "--set=kv_bytes_per_token=1"), "62,500,000,000,000,000 blocks; give less"),
        (("--dtype", "int4"), "'int4' is not one of"),
        (("--attention", "guessing"), "'guessing' is not one of"),
        (("--model", "./nowhere"), "'--model': './nowhere' is neither a folder nor a file"),
        (("--model", "/nowhere"), "'/nowhere' is neither a folder nor a file; give one, or a name"),
        (("--model", "some/model/"), "'some/model/' is neither a folder nor a file"),
        (("--model", "data/some/model"), "'data/some/model' is neither a folder nor a file"),
        (("--max-num-batched-tokens", "64"), "64 is less than --max-num-seqs 256"),
        (("--max-num-seqs", "4096"), "--max-num-batched-tokens 2048 is less than --max-num-seqs 4096"),
        (("--kv-cache-gb", "0.001"), "--kv-cache-gb 0.001 holds no block of 2,097,152 bytes"),
    ],
)
def test_a_value_out_of_range_is_quoted_with_its_option(arguments: tuple[str, ...], named: str) -> None:
    assert named in error(*arguments)


def test_an_error_in_the_environment_names_the_variable() -> None:
    # Kubernetes sets this for a service named warmroute.
    said = error(environment={"WARMROUTE_PORT": "tcp://10.0.0.1:80"})
    assert "Invalid value for WARMROUTE_PORT in the environment (--port): 'tcp://10.0.0.1:80'" in said


@pytest.mark.parametrize("variable", ["WARMROUTE_API_KEY", "WARMROUTE_CURVE_SECRET", "WARMROUTE_CONFIG"])
def test_an_empty_variable_is_not_taken_for_none(variable: str) -> None:
    assert error(environment={variable: ""}) == (
        f"Error: {variable} in the environment is empty; give it a value, or unset it\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("block_size = 16\nport = 70000", "Invalid value for port in c.toml, line 2: 70000 is not in the range"),
        ('\n\n# note\nport = "8001"', "c.toml, line 4: port is '8001'; write a whole number"),
        ("port = true", "c.toml, line 1: port is True; write a whole number"),
        ("port = 80.5", "c.toml, line 1: port is 80.5; write a whole number"),
        ("drain_timeout = '1'", "c.toml, line 1: drain_timeout is '1'; write a number"),
        (f"drain_timeout = 1{'0' * 400}", "drain_timeout in c.toml, line 1: The number is too large"),
        ("events = 1", "c.toml, line 1: events is 1; write true or false"),
        ("api_key = 5", "c.toml, line 1: api_key is no text; write text in quotes"),
        ("max_nun_seqs = 1", "c.toml, line 1: 'max_nun_seqs' is not a setting; did you mean 'max_num_seqs'?"),
        ("max-num-seqs = 1", "c.toml, line 1: 'max-num-seqs' is not a setting; did you mean 'max_num_seqs'?"),
        ("zzz = 1", "'zzz' is not a setting; `warmroute replica --help` lists the settings"),
        ("a = 1\n[simulated]\nx = 1", "'a' is not a setting"),
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


def test_memory_and_number_contradict_each_other_only_in_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("kv_cache_gb = 1.0\n")
    assert "give one of them" in error("--num-blocks", "5", "--kv-cache-gb", "1")
    assert config("--num-blocks", "5", "--config", str(tmp_path / "c.toml")).engine.num_blocks == 5
    memory = config("--kv-cache-gb", "1", environment={"WARMROUTE_NUM_BLOCKS": "5"}).engine.num_blocks
    assert memory == 10**9 // (16 * 131072)


@pytest.mark.parametrize("key", ["max_model_len", "num_blocks"])
def test_lengths_of_the_simulated_engine_are_its_own_or_given(key: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f"{key} = 7")
    assert at(config(), f"engine.{key}") == 8192
    assert at(config(ALL[key].option, "7"), f"engine.{key}") == 7
    assert at(config(environment={ALL[key].variable: "7"}), f"engine.{key}") == 7
    assert at(config("--config", str(tmp_path / "c.toml")), f"engine.{key}") == 7


@pytest.mark.parametrize(
    ("arguments", "ports"), [((), (5557, 5558, 5559, 5560)), (("--events-port", "7000"), (7000, 7001, 7002, 7003))]
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


def tokenizer_in(folder: Path) -> str:
    vocabulary = {"[UNK]": 0, "a": 1, "</s>": 2}
    Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return str(folder)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return tokenizer_in(tmp_path)


def test_a_model_folder_brings_its_tokenizer(model: str) -> None:
    made = config(base=("--model", model, "--engine", "simulated"))
    assert (made.tokenizer, made.engine.model) == (model, Path(model).name)
    assert (made.engine.vocabulary, made.engine.eos_token_ids) == ((0, 3), (2,))


# ---- the native engine


@pytest.fixture
def native(tmp_path: Path) -> tuple[str, ...]:
    return ("--model", model_folder(tmp_path))


def test_the_native_engine_is_told_what_its_model_says(native: tuple[str, ...]) -> None:
    made = config(base=native).engine
    assert (made.engine, made.model, made.model_path) == ("native", Path(native[1]).name, native[1])
    assert (made.dtype, made.vocabulary, made.max_model_len) == ("float32", (0, 300), 512)
    assert (made.device, made.num_blocks) == ("auto", 0), "the capacity is determined on the device"


def test_the_type_is_that_of_the_model_unless_given(tmp_path: Path) -> None:
    base = ("--model", model_folder(tmp_path, dtype="bfloat16"))
    auto, given = config(base=base).engine, config("--dtype", "float32", base=base).engine
    assert (auto.dtype, given.dtype) == ("bfloat16", "float32")
    sized = config("--kv-cache-gb", "0.1", base=base).engine
    assert sized.num_blocks == 10**8 // (16 * FP32_TOKEN // 2)


def test_a_model_may_be_used_for_less_than_its_length_and_not_for_more(native: tuple[str, ...]) -> None:
    assert config("--max-model-len", "100", base=native).engine.max_model_len == 100
    said = error("--max-model-len", "513", base=native)
    assert (
        said == f"Error: --model: {native[1]} has 512 positions, so --max-model-len 513 is too long; give 512 or less\n"
    )


def test_a_broken_file_beside_the_model_is_reported_with_the_setting_that_named_it(
    native: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    said = error(base=native)
    assert said.startswith(f"Error: --model: {tmp_path}/generation_config.json cannot be used: ")
    assert said.count("\n") == 1


def test_with_a_tokenizer_from_elsewhere_the_ends_of_both_count(native: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    tokenizer_in(tmp_path / "other")
    made = config("--tokenizer", str(tmp_path / "other"), base=native)
    assert made.engine.eos_token_ids == (2, 7, 8)
    assert made.engine.vocabulary == (0, 300)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--model", "unheard-of"),
            "--model: 'unheard-of' is not a model; give smollm2, demo, a folder with its files, or ORG",
        ),
        (("--model", "."), "has no config.json"),
        (("--set=kv_bytes_per_token=5",), "kv_bytes_per_token 5 is only for the simulated engine; leave it out"),
        (("--simulated-answers", __file__), "test_settings.py is only for the simulated engine; leave it out"),
        (("--kv-cache-gb", "0.000001"), "--kv-cache-gb 1e-06 holds no block of 4,096 bytes; give more"),
        (("--disk-kv-gb", "5"), "--disk-kv-gb 5 is the size of --disk-kv; give --disk-kv DIR too, or leave it out"),
        (("--disk-kv", __file__), "test_settings.py' is no folder; give one, or one that is to be made"),
        (("--disk-kv", ""), "--disk-kv '' is no folder; give one, or one that is to be made"),
        (
            ("--disk-kv", "x", "--host-kv-gb", "0"),
            "through the host's memory, and --host-kv-gb 0 holds none; give more",
        ),
        (("--disk-kv", "x", "--no-enable-prefix-caching"), "--disk-kv x is of no use without prefix caching"),
        (("--disk-kv", "x", "--disk-kv-gb", "0.000001"), "--disk-kv-gb 1e-06 holds no block of 4,096 bytes; give more"),
        (("--disk-kv", "x", "--engine", "simulated"), "--disk-kv x is only for the native engine; leave it out"),
    ],
)
def test_settings_that_the_native_engine_cannot_use_are_reported_in_one_line(
    arguments: tuple[str, ...], said: str, native: tuple[str, ...]
) -> None:
    whole = error(*arguments, base=native)
    assert said in whole
    assert whole.count("\n") == 1


def test_a_folder_for_blocks_need_not_be_there(native: tuple[str, ...], tmp_path: Path) -> None:
    engine = config("--disk-kv", str(tmp_path / "new"), "--host-kv-gb", "1", "--disk-kv-gb", "2", base=native).engine
    assert (engine.disk_kv, engine.disk_blocks) == (str(tmp_path / "new"), 2 * 10**9 // 4096)


def test_a_model_that_does_not_run_is_refused_with_what_does(tmp_path: Path) -> None:
    said = error(base=("--model", model_folder(tmp_path, architectures=["MambaForCausalLM"])))
    assert "MambaForCausalLM" in said
    assert "Qwen3ForCausalLM" in said


def test_the_demo_model_is_made_where_the_cache_is_and_keeps_its_name(tmp_path: Path) -> None:
    made = config(base=("--model", "demo"), environment={"WARMROUTE_CACHE_DIR": str(tmp_path)})
    assert Path(made.engine.model_path).parent == tmp_path
    assert (made.engine.model, made.tokenizer, made.engine.dtype) == ("demo", made.engine.model_path, "float32")


def test_settings_never_import_torch(native: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom replica.cli import replica\nfrom replica.settings.configure import config_from\n"
        f"with replica.make_context('replica', {list(native)!r}) as ctx: config_from(ctx)\n"
        "print('torch' in sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout == "False\n"


def test_the_file_in_the_docs_is_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "replica.md").read_text()
    (tmp_path / "c.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    made = config("--config", str(tmp_path / "c.toml"), base=())
    assert (made.engine.num_blocks, made.engine.max_model_len) == (9_536, 16_384)


def test_help_shows_every_setting_in_its_group() -> None:
    shown = run("--help").output
    assert "2147483647" not in shown
    assert all(f"  {setting.option if setting.flag else setting.key}" in shown for setting in ALL.values())
    assert shown.index("Cache:") < shown.index("--num-blocks") < shown.index("Events:") < shown.index("--events-port")
