"""Sources of a setting's value, and the resulting configuration of a router."""

from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import zmq
from click.testing import CliRunner, Result

from api.process.options import SettingsCommand
from api.process.settings import Setting
from router.config import RouterConfig
from router.members.spec import ReplicaSpec, parse_replica, parse_replicas
from router.process.configure import config_from
from router.process.settings import TABLE
from router.tenants.keys import find, parse_keys

# Fields that no single setting is, and the settings that make them.
DERIVED = {"replicas", "kubernetes", "model_dirs", "chat_templates", "keys", "demand_key", "message_cache_bytes"}
OTHER_VALUES = {
    "text": "x",
    "integer range": 7,
    "float range": 0.5,
    "url": "http://10.0.0.9:1",
    "origin": "https://a.example",
    "key": "k",
    "path": "/v1/videos",
    "endpoint": "ipc://peers",
    "address": "127.0.0.1:9002",
}
WITH = {
    "tls_cert": "tls_key",
    "tls_key": "tls_cert",
    "log_prompts": "request_log",
    "curve_server": "curve_secret",
    "curve_secret": "curve_server",
    "peer": "peer_listen",
    "peer_keys": "peer_listen",
}
_PUBLIC, _SECRET = (key.decode() for key in zmq.curve_keypair())
GOOD_FILES = {
    "replicas_file": "",
    "api_keys": "[keys.a]\nkey = 'a'",
    "curve_server": f'curve\n    public-key = "{_PUBLIC}"\n',
    "curve_secret": f'curve\n    public-key = "{_PUBLIC}"\n    secret-key = "{_SECRET}"\n',
}
GOOD_FILES["peer_keys"] = GOOD_FILES["curve_secret"]


def run(*arguments: str, environment: dict[str, str] | None = None) -> Result:
    """Run a command that prints its configuration."""

    @click.command(cls=SettingsCommand, table=TABLE)
    @click.pass_context
    def show(ctx: click.Context, /, **_: object) -> None:
        click.echo(msgspec.json.encode(config_from(ctx)))

    return CliRunner().invoke(show, arguments, env=environment)


def config(*arguments: str, environment: dict[str, str] | None = None) -> RouterConfig:
    result = run(*arguments, environment=environment)
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout, type=RouterConfig)


def error(*arguments: str, environment: dict[str, str] | None = None) -> str:
    result = run(*arguments, environment=environment)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_every_field_has_a_setting() -> None:
    fields = {setting.field for setting in TABLE.all.values() if setting.field}
    assert fields | DERIVED == set(RouterConfig.__struct_fields__)
    assert fields.isdisjoint(DERIVED)


def test_without_settings_the_configuration_has_its_own_defaults() -> None:
    assert config() == RouterConfig()


def other_value(setting: Setting, folder: Path) -> Any:
    """A value that is not the default."""
    if isinstance(setting.type, click.Choice):
        return setting.type.choices[-1]
    if isinstance(setting.type, click.Path):
        path = folder / setting.key
        path.write_text(GOOD_FILES.get(setting.key, ""))
        return str(path)
    if setting.type is click.BOOL:
        return setting.key != "resume"
    if setting.key == "max_bodies_bytes":
        return 2**40  # room for two of the largest
    return OTHER_VALUES[setting.type.name]


def toml(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


@pytest.mark.parametrize("setting", [s for s in TABLE.all.values() if s.field], ids=lambda s: s.key)
def test_a_setting_arrives_by_flag_environment_and_file(setting: Setting, tmp_path: Path) -> None:
    value = other_value(setting, tmp_path)
    flag = [f"{setting.option}={str(value).lower() if setting.type is click.BOOL else value}"]
    if setting.type is click.BOOL and setting.flag:
        flag = [setting.option if value else f"--no-{setting.option[2:]}"]
    base = []
    if other := WITH.get(setting.key):
        base = [TABLE.all[other].option, other_value(TABLE.all[other], tmp_path)]
    expected = (value,) if setting.multiple else value
    written = f"[{toml(value)}]" if setting.multiple else toml(value)
    (tmp_path / "c.toml").write_text(f"{setting.key} = {written}")
    assert getattr(config(*flag, *base), setting.field) == expected
    assert getattr(config(*base, environment={setting.variable: str(value)}), setting.field) == expected
    assert getattr(config(*base, "--config", str(tmp_path / "c.toml")), setting.field) == expected


def test_what_may_be_repeated_is_a_list_in_the_file_and_has_spaces_in_the_environment(tmp_path: Path) -> None:
    urls = ["http://h:1", "http://h:2,engine=vllm"]
    expected = tuple(map(parse_replica, urls))
    (tmp_path / "c.toml").write_text(f"replica = {urls}")
    assert config("--replica", urls[0], "--replica", urls[1]).replicas == expected
    assert config(environment={"WARMROUTE_REPLICA": " ".join(urls)}).replicas == expected
    assert config("--config", str(tmp_path / "c.toml")).replicas == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--replica", "h:1"), "--replica: 'h:1' in 'h:1' is not key=value; write http://HOST:PORT"),
        (("--replica", "http://h:1", "--replica", "http://h:1"), "--replica: two replicas are named 'h:1'"),
        (("--replica", "http://h:1,api_key_env=NOT_SET_HERE"), "api_key_env is 'NOT_SET_HERE', which is not set"),
        (("--replica", "http://h:1,events=tcp://h:2,curve_server=a,curve_secret=b"), "a is not a CURVE key file"),
        (("--replicas-file", "nowhere.toml"), "'nowhere.toml' does not exist"),
        (("--registry", "h:1"), "'--registry': 'h:1' is not a URL; write http://HOST:PORT"),
        (("--registry", "http://h:x"), "'http://h:x' is not a URL"),
        (("--otlp-endpoint", "http://u@h:1"), "'http://u@h:1' is not a URL"),
        (("--cors-origin", "https://a.example/v1"), "'https://a.example/v1' has a path"),
        (("--cors-origin", "https://a.example/path"), "'https://a.example/path' has a path"),
        (("--set=client_path=/replicas",), "'/replicas' is not a path below /v1/; write it like /v1/videos"),
        (("--set=client_path=/v1/videos/",), "'/v1/videos/' is not a path below /v1/"),
        (("--set=client_path=/v1/{x}",), "'/v1/{x}' is not a path below /v1/"),
        (
            ("--kubernetes-namespace", "n"),
            "is of no use alone; give --kubernetes-pods or --kubernetes-pool too",
        ),
        (("--kubernetes-pods", "app=a"), "--kubernetes-pods: this process has no pod service account"),
        (
            ("--kubernetes-pods", "app=a", "--kubernetes-pool", "llm"),
            "--kubernetes-pods and --kubernetes-pool would name the same pods in two ways; give one",
        ),
        (("--kubernetes-pool", "llm"), "--kubernetes-pool: this process has no pod service account"),
        (("--kubernetes-pool", "a/b"), "--kubernetes-pool: 'a/b' is no name of an InferencePool; write its metadata"),
        (("--peer", "tcp://h:1"), "--peer is of no use alone: routers tell each other; give --peer-listen too"),
        (("--peer-keys", __file__), "--peer-keys is of no use alone; give --peer-listen too"),
        (("--peer-listen", "tcp://0.0.0.0:5570"), "--peer-listen tcp://0.0.0.0:5570: whoever reaches it could tell"),
        (("--peer-listen", "0.0.0.0:5570"), "'0.0.0.0:5570' is no endpoint; write tcp://HOST:PORT or ipc://PATH"),
        (("--peer-listen", "tcp://127.0.0.1:99999"), "'tcp://127.0.0.1:99999' is no endpoint"),
        (("--peer-listen", "ipc://x", "--peer-keys", __file__), f"--peer-keys: {__file__} is not a CURVE key"),
        (("--curve-server", __file__), "--curve-server and --curve-secret belong together"),
        (("--curve-secret", __file__), "--curve-server and --curve-secret belong together"),
        (("--curve-server", __file__, "--curve-secret", __file__), f"{__file__} is not a CURVE key file"),
        (("--kubernetes-pods", "app in a"), "--kubernetes-pods: 'app in a' in 'app in a' is not a selector"),
        (("--model-dir", "nowhere"), "--model-dir: 'nowhere' has no tokenizer.json; name the model's folder"),
        (("--model-dir", "m=nowhere"), "--model-dir: 'nowhere' has no tokenizer.json"),
        (("--tls-cert", __file__), "--tls-cert needs --tls-key too"),
        (("--tls-key", __file__), "--tls-key needs --tls-cert too"),
        (("--policy", "best"), "'best' is not one of 'cost', 'prefix'"),
        (("--port", "70000"), "'--port': 70000 is not in the range"),
        (("--set=connect_timeout=0",), "'--set=connect_timeout': 0.0 is not"),
        (("--set=idle_timeout=inf",), "inf is not a finite number"),
        (("--api-key", "a", "--admin-key", "a"), "--admin-key is one of the keys of --api-key"),
    ],
)
def test_what_cannot_be_used_is_quoted_with_its_option(arguments: tuple[str, ...], said: str) -> None:
    assert said in error(*arguments)


@pytest.mark.parametrize("option", ["--api-key", "--admin-key", "--replica-api-key"])
def test_a_key_is_never_quoted(option: str, tmp_path: Path) -> None:
    said = error(option, "s3cret s3cret")
    assert "The key is empty or has characters that are invalid in a header" in said
    assert "s3cret" not in said
    (tmp_path / "c.toml").write_text(f"{option[2:].replace('-', '_')} = 123456")
    said = error("--config", str(tmp_path / "c.toml"))
    assert "text in quotes" in said
    assert "123456" not in said


def test_a_list_is_demanded_where_there_may_be_several(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("\nreplica = 'http://h:1'")
    assert "c.toml, line 2: replica is 'http://h:1'; write a list of text in quotes" in error(
        "--config", str(tmp_path / "c.toml")
    )
    (tmp_path / "c.toml").write_text("replicas = []")
    assert "'replicas' is not a setting; did you mean 'replica" in error("--config", str(tmp_path / "c.toml"))


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--replicas-file", "[[replicas]]\nurl = 'h'", "f.toml, line 1: url is 'h'"),
        ("--api-keys", "[keys.a]", "f.toml: keys.a needs either key or key_sha256"),
    ],
)
def test_a_broken_file_is_refused_at_the_start(option: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(text)
    assert said in error(option, str(tmp_path / "f.toml"))


def test_keys_are_demanded_where_some_are_given(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("[keys.a]\nkey = 'a'")
    assert not config().demand_key
    assert config(environment={"WARMROUTE_API_KEY": "a b"}).demand_key
    assert len(config(environment={"WARMROUTE_API_KEY": "a b"}).keys) == 2
    assert config("--api-keys", str(tmp_path / "keys.toml")).demand_key
    alone = config("--admin-key", "root")
    assert (alone.demand_key, [key.admin for key in alone.keys]) == (False, [True])


def test_the_configuration_holds_no_key_in_clear() -> None:
    assert "s3cret" not in repr(config("--api-key", "s3cret-1", "--admin-key", "s3cret-2"))


def test_an_empty_variable_is_not_taken_for_none() -> None:
    assert error(environment={"WARMROUTE_API_KEY": ""}) == (
        "Error: WARMROUTE_API_KEY in the environment is empty; give it a value, or unset it\n"
    )


def test_pods_of_kubernetes_are_found_by_their_pool() -> None:
    environment = {"WARMROUTE_KUBERNETES_POOL": "llm", "WARMROUTE_KUBERNETES_API": "http://127.0.0.1:8001"}
    made = config(environment=environment).kubernetes
    assert made is not None
    assert (made.pods, made.pool) == (None, "llm")


def test_folders_of_models_are_named_by_model_or_by_themselves(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b=c")]
    for folder in folders:
        folder.mkdir()
        (folder / "tokenizer.json").touch()
    plain, equals = map(str, folders)
    made = config("--model-dir", plain, "--model-dir", f"org/m={plain}", "--model-dir", equals)
    assert made.model_dirs == {plain: plain, "org/m": plain, equals: equals}
    assert "has two folders" in error("--model-dir", f"m={plain}", "--model-dir", f"m={equals}")
    assert "names no model before the =" in error("--model-dir", f"={plain}")


def test_a_chat_template_is_that_of_a_named_model_or_of_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    first, second = (str(tmp_path / name) for name in ("a.jinja", "b.jinja"))
    for path in (first, second):
        Path(path).touch()
    one = ("--model-dir", f"m={tmp_path}")
    two = (*one, "--model-dir", f"n={tmp_path}")
    assert config(*one, "--chat-template", first).chat_templates == {"m": first}
    assert config(*two, "--chat-template", f"n={first}").chat_templates == {"n": first}
    assert f"{first!r} names no model; write MODEL=FILE" in error(*two, "--chat-template", first)
    assert config("--chat-template", f"x={first}").chat_templates == {"x": first}  # its tokens may be bytes
    assert "names no model before the =" in error("--chat-template", f"={first}")
    assert "'nowhere' is no file" in error(*one, "--chat-template", "m=nowhere")
    assert "has two templates" in error(*one, "--chat-template", first, "--chat-template", f"m={second}")


def test_the_cache_is_given_in_megabytes() -> None:
    assert config("--set=message_cache_mb=1.5").message_cache_bytes == 1_500_000


def test_the_files_in_the_docs_are_accepted() -> None:
    docs = Path(__file__).parents[3] / "docs"
    pages = [(docs / name).read_text() for name in ("discovery.md", "keys.md")]
    replicas, keys = (page.partition("```toml\n")[2].partition("```")[0] for page in pages)
    assert list(parse_replicas("f", replicas)) == ["10.0.0.1:8001", "big"]
    found = {key.digest: key for key in parse_keys("f", keys)}
    assert {key.name for key in found.values()} == {"alice", "bob", "carol", "operator", "dave"}
    assert find(found, b"a-key-of-bobs") is not None


def test_every_key_of_a_replica_is_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "discovery.md").read_text()
    assert [name for name in ReplicaSpec.__struct_fields__ if f"`{name}`" not in page] == []


def test_help_shows_every_setting_in_its_group_and_those_without_an_option_at_the_end() -> None:
    shown = run("--help").output
    assert "2147483647" not in shown
    groups, _, keys = shown.partition("Keys of --set:")
    for setting in TABLE.all.values():
        assert f"  {setting.option}" in groups if setting.flag else f"  {setting.key}=" in keys
    assert shown.index("Replicas:") < shown.index("--registry") < shown.index("Access:") < shown.index("--admin-key")


def test_set_gives_what_has_no_option_of_its_own_and_wins_over_environment_and_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("slow_start = 1")
    weaker = ("--config", str(tmp_path / "c.toml"))
    assert config("--set", "slow_start=3", *weaker, environment={"WARMROUTE_SLOW_START": "2"}).slow_start_s == 3
    assert config("--set=slow_start=3", "--set=slow_start=4").slow_start_s == 4
    assert config("--set=client_path=/v1/a", "--set=client_path=/v1/b").client_paths == ("/v1/a", "/v1/b")
    assert "--set slow-start=1: 'slow-start' is not a setting; did you mean 'slow_start'?" in error(
        "--set=slow-start=1"
    )
    assert "--set port=1: write --port instead" in error("--set=port=1")
    assert "--set slow_start: write --set=slow_start=VALUE instead" in error("--set=slow_start")
    assert "--slow-start is no option; write --set slow_start=VALUE" in error("--slow-start", "1")
