"""fleet.toml: the contents of valid files, and the errors of invalid ones."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.plan import Autoscale, FleetPlan, ModelPlan, Resources, check, encode
from fleet.toml.options import OWN_OF_REPLICA, OWN_OF_ROUTER
from fleet.toml.plan_file import BadPlan, ModelTable, parse_fleet, read_fleet
from replica.settings.options import TABLE as REPLICA_TABLE
from router.process.settings import TABLE as ROUTER_TABLE

PAGE = (Path(__file__).parents[2] / "docs" / "fleet-file.md").read_text()
EXAMPLE = PAGE.partition("```toml\n")[2].partition("```")[0]


@pytest.fixture(autouse=True)
def _folders_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen3-32b").mkdir(parents=True)
    (tmp_path / "models" / "qwen3-32b" / "tokenizer.json").write_text("{}")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "qwen.jinja").write_text("{{ messages }}")
    monkeypatch.setenv("QWEN_KEY", "secret")


def model(text: str) -> ModelPlan:
    """The only one, of this text below its heading."""
    [plan] = parse_fleet("fleet.toml", f"[[models]]\n{text}").models
    return plan


def wrong(text: str) -> str:
    with pytest.raises(BadPlan) as raised:
        parse_fleet("fleet.toml", text)
    return str(raised.value)


def wrong_model(text: str) -> str:
    """Error of a model's table, without the file and the line if that is the third."""
    return wrong(f"[[models]]\nmodel = 'demo'\n{text}").removeprefix("fleet.toml, line 3: ")


# ---- valid files


def test_a_model_alone_is_enough() -> None:
    assert parse_fleet("f", "[[models]]\nmodel = 'demo'") == FleetPlan(models=(ModelPlan(name="demo", model="demo"),))


def test_the_example_in_the_docs_says_what_the_docs_say(tmp_path: Path) -> None:
    plan = parse_fleet("fleet.toml", EXAMPLE)
    small, large, prefill = plan.models
    assert plan.router == ("--policy=cost", "--queue-timeout=10", "--cors-origin=https://chat.example")
    assert small == ModelPlan(
        name="small",
        model="demo",
        replicas=2,
        resources=Resources(cpus=2.0, custom={"fast_disk": 1.0}),
        options=("--kv-cache-gb=4", "--max-num-seqs=64", "--set=partial_reuse=false"),
        drain_timeout_s=30.0,
        wedged_after_s=20.0,
    )
    assert large == ModelPlan(
        name="qwen",
        model=str(tmp_path / "models" / "qwen3-32b"),
        engine="vllm",
        replicas=1,
        resources=Resources(cpus=1.0, gpus=4.0),
        tensor_parallel=4,
        autoscale=Autoscale(min=1, max=8, ttft_target_s=0.5),
        environment={"VLLM_LOGGING_LEVEL": "WARNING"},
        options=("--max-model-len=32768", "--enable-lora", "--lora-modules", "german=adapters/german"),
        tokenizer=str(tmp_path / "models" / "qwen3-32b"),
        chat_template=str(tmp_path / "templates" / "qwen.jinja"),
        adapters=("german",),
        resume=True,
        api_key_env="QWEN_KEY",
        role="decode",
    )
    assert (prefill.name, prefill.served_name, prefill.role, prefill.replicas) == ("qwen-prefill", "qwen", "prefill", 1)


def test_the_example_has_every_key_and_the_page_names_it() -> None:
    used = {key for table in tomllib.loads(EXAMPLE)["models"] for key in table}
    assert used == set(ModelTable.__struct_fields__)
    rows = re.findall(r"^\| `([a-z_.]+)`", PAGE, re.MULTILINE)
    more = [f"autoscale.{key}" for key in Autoscale.__struct_fields__]
    more += [f"resources.{key}" for key in Resources.__struct_fields__]
    assert set(rows) == {*ModelTable.__struct_fields__, *more} - {"autoscale", "resources"}


def test_tables_may_serve_one_name_in_different_roles() -> None:
    text = "[[models]]\nmodel = 'demo'\nrole = 'decode'\nreplicas = 3\n"
    text += "[[models]]\nname = 'p'\nmodel = 'demo'\nserves = 'demo'\nrole = 'prefill'"
    decode, prefill = parse_fleet("fleet.toml", text).models
    assert (decode.served_name, decode.role, decode.replicas) == ("demo", "decode", 3)
    assert (prefill.name, prefill.served_name, prefill.role, prefill.replicas) == ("p", "demo", "prefill", 1)


def test_tables_that_serve_one_name_have_one_model_and_one_tokenizer() -> None:
    text = "[[models]]\nname = 'a'\nmodel = 'x/y'\n[[models]]\nname = 'b'\nmodel = 'x/z'\nserves = 'a'"
    assert wrong(text) == "fleet.toml, line 6: another table serves 'a', too; give both the same model"
    text = "[[models]]\nname = 'a'\nmodel = 'x/y'\ntokenizer = 'models/qwen3-32b'\n"
    text += "[[models]]\nname = 'b'\nmodel = 'x/y'\nserves = 'a'"
    assert wrong(text) == "fleet.toml, line 8: another table serves 'a', too; give both the same tokenizer"


def test_options_of_other_engines_are_passed_on_whatever_they_are() -> None:
    plan = model(
        "model = 'a/b'\nengine = 'vllm'\n[models.options]\nmax_model_len = 100\nenforce-eager = true\n"
        "enable-chunked-prefill = false\nlora-modules = ['a=b', 'c=d']\n"
        "speculative-config = {method = 'ngram', n = [1]}"
    )
    assert plan.options == (
        "--max-model-len=100",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
        "--lora-modules",
        "a=b",
        "c=d",
        '--speculative-config={"method": "ngram", "n": [1]}',
    )


def test_gpus_follow_tensor_parallel_where_nothing_is_reported() -> None:
    assert model("model = 'a/b'\nengine = 'vllm'\ntensor_parallel = 4").resources.gpus == 4
    assert model("model = 'a/b'\nengine = 'sglang'").resources.gpus == 1
    assert model("model = 'a/b'\nengine = 'vllm'\nresources = {gpus = 0.5}").resources.gpus == 0.5  # two share one
    assert model("model = 'demo'").resources.gpus == 0


@pytest.mark.parametrize("engine", ["native", "simulated"])
def test_a_replica_of_ours_takes_one_gpu(engine: str) -> None:
    assert model("model = 'demo'").resources.cpus == 1
    said = wrong(f"[[models]]\nmodel = 'demo'\nengine = '{engine}'\ntensor_parallel = 4")
    assert said == ("fleet.toml, line 4: tensor_parallel is 4, but a replica of ours takes one GPU; use vllm or sglang")


def test_autoscale_begins_at_its_least() -> None:
    assert model("model = 'demo'\nautoscale = {min = 3, max = 4}").replicas == 3
    assert model("model = 'demo'\nreplicas = 4\nautoscale = {min = 3, max = 4}").replicas == 4


def test_a_folder_is_the_same_from_everywhere(tmp_path: Path) -> None:
    assert model("model = 'models/qwen3-32b'").model == str(tmp_path / "models" / "qwen3-32b")
    assert model("model = 'models/qwen3-32b'").name == "qwen3-32b"


def test_settings_in_the_environment_say_nothing_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_NUM_BLOCKS", "none")
    monkeypatch.setenv("WARMROUTE_REPLICAS_FILE", "nowhere")
    assert model("model = 'demo'").options == ()


# ---- errors


def rows_of_mistakes() -> list[tuple[str, str]]:
    table = PAGE.partition("## Mistakes")[2]
    rows = re.findall(r"^\| (`.*`) \| `(.*)` \|$", table, re.MULTILINE)
    assert len(rows) >= 10
    return [("\n".join(re.findall(r"`([^`]*)`", lines)), message) for lines, message in rows]


@pytest.mark.parametrize(("lines", "message"), rows_of_mistakes())
def test_the_messages_in_the_docs_are_those_given(lines: str, message: str) -> None:
    assert wrong(f'[[models]]\nmodel = "demo"\n{lines}\n') == message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replicas = 1.0", "replicas is 1.0: expected `int`, got `float`"),
        ("replicas = true", "replicas is true: expected `int`, got `bool`"),
        ("replicas = 1001", "replicas is 1001: expected `int` <= 1000"),
        ("autoscale = {min = 1, max = 1001}", "max is 1001: expected `int` <= 1000"),
        (
            "autoscale = {min = 1, max = 2, ttft_target_s = 1e-320}",
            "ttft_target_s is 1e-320: expected `float` >= 0.001",
        ),
        ('name = "a\\nb"', "the name 'a\\nb' has a character that cannot be printed; leave it out"),
        ('name = "a\\u001b[2Jb"', "the name 'a\\x1b[2Jb' has a character that cannot be printed"),
        ('adapters = ["a\\nb"]', "the name 'a\\nb' has a character that cannot be printed; leave that out"),
        ("drain_timeout = 1e9", "drain_timeout is 1000000000.0: expected `float` <= 100000000.0"),
        ("resources = {cpus = 1e300}", "cpus is 1e+300: expected `float` <= 1000000000.0"),
        ("tensor_parallel = 1025", "tensor_parallel is 1025: expected `int` <= 1024"),
        ("name = ''", "name is '': expected `str` of length >= 1"),
        (f"name = '{'x' * 101}'", "has 101 characters; write name, with 100 at most"),
        ("drain_timeout = -1", "drain_timeout is -1: expected `float` >= 0.0"),
        ("drain_timeout = nan", "drain_timeout is nan: expected `float` >= 0.0"),
        ("wedged_after = 0", "wedged_after is 0: expected `float` >= 0.001"),
        ("autoscale = {min = 0, max = 2}", "min is 0: expected `int` >= 1"),
        ("autoscale = {min = 1}", "max is missing in autoscale"),
        ("autoscale = {min = 1, max = 2, target = 1}", "'target' is not known here"),
        ("replicas = 9\nautoscale = {min = 1, max = 8}", "replicas is 9, but autoscale goes from 1 to 8; leave"),
        ("autoscale = 3", "autoscale is 3: expected `table`, got `int`"),
        ("resources = {cpus = '1'}", "cpus is '1': expected `float`, got `str`"),
        ("resources = {custom = {GPU = 1}}", "'GPU' cannot be a custom resource; write cpus or gpus, or another name"),
        ("resources = {custom = {a = 0}}", "custom is {'a': 0}: expected `float` > 0.0"),
        ("environment = {'A-B' = 'x'}", "'A-B' is not the name of a variable"),
        ("environment = 'x'", "environment is 'x': expected `table`, got `str`"),
        ("options = 3", "options is 3: expected `table`, got `int`"),
        ("options = {num-blocks = 2, kv-cache-gb = 1}", "--num-blocks and --kv-cache-gb both size the cache"),
        ("options = {num-blocks = true}", "num-blocks is true; write a string or a number"),
        ("options = {events = 1}", "events is 1; write true or false"),
        ("options = {curve-secret = 'x'}", "curve-secret is set by the fleet; leave it out"),
        ("options = {api_key = 'x'}", "api_key is set by the fleet; write api_key_env below [[models]] instead"),
        ("options = {drain-timeout = 1}", "drain-timeout is set by the fleet; write drain_timeout below [[models]]"),
        ("tokenizer = 'nowhere'", "tokenizer is 'nowhere', which has no tokenizer.json; name the folder of one"),
        ("chat_template = 'nowhere'", "chat_template is 'nowhere', which is not a file; name a Jinja template"),
        ("adapters = 'x'", "adapters is 'x': expected `list`, got `str`"),
        ("resume = true", "resume is for vllm and sglang; leave it out"),
        ("role = 'prefil'", "role is 'prefil': invalid enum value 'prefil'; write prefill, decode or both"),
        ("role = 1", "role is 1: expected `str`, got `int`; write prefill, decode or both"),
        ("engine = 'simulated'\nrole = 'both'", "line 4: role is for native and vllm; leave it out, or write"),
        ("options = {role = 'both'}", "role is set by the fleet; write role below [[models]] instead"),
        ("serves = ''", "serves is '': expected `str` of length >= 1"),
        ("serves = '-x'", "the name '-x' looks like an option; leave out the dash"),
        ("engine = 3", "engine is 3; write native, simulated, vllm or sglang"),
        ("engine = 'vllm'", "model is 'demo', which vllm does not know; name a folder, or ORG/NAME"),
    ],
)
def test_a_mistake_is_named_with_its_value_and_the_fix(text: str, said: str) -> None:
    message = wrong_model(text)
    assert said in message
    assert "\n" not in message


def test_a_key_given_where_a_variable_is_named_is_not_shown() -> None:
    assert "sk-12345" not in wrong_model("api_key_env = 'sk-12345'")
    assert wrong_model("api_key_env = 'UNSET_KEY'") == (
        "api_key_env is 'UNSET_KEY', which is not set; export it, or name another"
    )


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        ("vllm", "{kv-events-config = {endpoint = 'x'}}", "kv-events-config is set by the fleet; leave it out"),
        ("vllm", "{data-parallel-size = 2}", "write more replicas below [[models]] instead"),
        ("vllm", "{'--a' = 1}", "'--a' is not the name of an option"),
        ("vllm", "{x = {b = 1979-05-27}}", "contains a date or nan"),
        ("vllm", "{x = 1979-05-27}", "write a string, a number, a list, or a table"),
        ("vllm", "{hos = '0.0.0.0'}", "hos abbreviates --host, which is set by the fleet; leave it out"),
        ("vllm", "{tp = 2}", "tp is set by the fleet; write tensor_parallel below [[models]] instead"),
        ("vllm", "{enable-prefix = false}", "enable-prefix abbreviates --enable-prefix-caching"),
        ("sglang", "{tp-s = 2}", "tp-s abbreviates --tp-size, which is set by the fleet; write tensor_par"),
        ("vllm", "{foo = [true, 1]}", "foo contains true; use strings or numbers"),
        ("vllm", "{foo = ['--headless']}", "foo has '--headless' in it, which starts an option; give that its own key"),
        ("vllm", "{foo = []}", "foo is []; put strings or numbers into the list, or leave it out"),
        ("sglang", "{enable-x = false}", "enable-x is false, but sglang has no --no-enable-x; leave it out"),
    ],
)
def test_options_that_no_engine_could_take_are_refused(engine: str, options: str, said: str) -> None:
    assert said in wrong(f"[[models]]\nmodel = 'a/b'\nengine = '{engine}'\noptions = {options}")


def test_fewer_gpus_than_the_engine_needs_are_refused() -> None:
    head = "[[models]]\nmodel = 'a/b'\nengine = 'vllm'\ntensor_parallel = 4\n"
    said = wrong(f"{head}resources = {{gpus = 2}}")
    assert said == "fleet.toml, line 5: gpus is 2, but tensor_parallel is 4; write gpus = 4"


def test_the_line_is_that_of_the_mistake_not_that_of_the_model() -> None:
    said = wrong(
        "[[models]]\nmodel = 'demo'\n\n[[models]]\nname = 'b'\nmodel = 'demo'\n[models.resources]\n\ngpu = 1\n"
    )
    assert said == "fleet.toml, line 9: 'gpu' is not known here; did you mean 'gpus'?"


def test_the_second_of_two_names_is_wrong() -> None:
    said = wrong("[[models]]\nmodel = 'demo'\n[[models]]\nmodel = 'a/b'\nname = 'demo'\n")
    assert said == "fleet.toml, line 5: two models have the name 'demo'; write another name for one"


@pytest.mark.parametrize("key", [key for key in OWN_OF_ROUTER if key != "die_with_parent"])
def test_what_the_fleet_says_to_its_router_is_refused(key: str) -> None:
    assert f"{key} is set by the fleet; " in wrong(f"[[models]]\nmodel = 'demo'\n[router]\n{key} = 'x'\n")


def test_keys_in_readable_places_are_refused_and_not_shown() -> None:
    for key in ("api_key", "admin_key", "replica_api_key"):
        said = wrong(f"[[models]]\nmodel = 'demo'\n[router]\n{key} = 'hidden'\n")
        assert f"export WARMROUTE_{key.upper()} instead" in said
        assert "hidden" not in said


def test_the_routers_settings_are_checked_together(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("")
    (tmp_path / "keys.toml").write_text("[keys]\nalice = 1")
    head = "[[models]]\nmodel = 'demo'\n[router]\nqueue_size = 1\n"
    assert wrong(f"{head}tls_cert = 'cert.pem'\n") == "fleet.toml, line 5: --tls-cert needs --tls-key too"
    assert wrong(f"{head}api-keys = 'keys.toml'\n").startswith("fleet.toml, line 5: --api-keys: keys.toml: keys.NAME")


def test_what_is_refused_as_the_fleets_own_are_settings_that_exist() -> None:
    assert OWN_OF_ROUTER.keys() <= ROUTER_TABLE.all.keys()
    assert OWN_OF_REPLICA.keys() <= REPLICA_TABLE.all.keys()


def test_no_toml_is_refused_at_its_line() -> None:
    assert wrong("[[models]]\nmodel = \n") == "fleet.toml, line 2: this is not TOML: Invalid value, column 9"
    assert wrong("[[models]]\nmodel = 'x") == (
        'fleet.toml, line 2: this is not TOML: Expected "\'" (at end of document)'
    )
    assert wrong("a = " + "[" * 10_000).startswith("fleet.toml, line 1: ")
    assert wrong("\na = 1" + "0" * 5000).startswith("fleet.toml, line 1: ")


def test_a_model_that_no_file_system_could_hold_is_refused() -> None:
    said = wrong(f"[[models]]\nname = 'a'\nmodel = '/{'x' * 300}'")
    assert said.startswith("fleet.toml, line 3: model is '/xxx")
    assert said.endswith("which cannot be looked at: File name too long; name a folder, or ORG/NAME")


def test_a_file_without_models_is_refused() -> None:
    said = "fleet.toml, line 1: there is no model; write [[models]], and below it model = 'demo', or another one"
    assert wrong("") == said
    assert wrong("models = []") == said
    assert "write [[models]], once for each model" in wrong("[models]\nmodel = 'demo'")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    for path, said in [
        ("nowhere.toml", "cannot read 'nowhere.toml': No such file or directory"),
        ("latin.toml", "latin.toml is not UTF-8: invalid continuation byte at byte 5; save it as UTF-8"),
        ("\0", "cannot read"),
    ]:
        with pytest.raises(BadPlan, match=re.escape(said)):
            read_fleet(path)
    (tmp_path / "good.toml").write_text("[[models]]\nmodel = 'demo'")
    assert read_fleet("good.toml").models[0].name == "demo"


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text("[[models]]\nmodel = 'demo'", encoding="utf-8-sig")
    assert read_fleet("fleet.toml").models[0].name == "demo"
    (tmp_path / "fleet.toml").write_text("a = 'é'", encoding="utf-8-sig")
    with pytest.raises(BadPlan, match=r"^fleet\.toml, line 1: 'a' is not known here"):
        read_fleet("fleet.toml")


# ---- arbitrary files

KEYS = st.sampled_from(
    [
        *ModelTable.__struct_fields__,
        *("min", "max", "cpus", "gpus", "custom", "models", "router", "policy", "num-blocks", "mdel", '"a.b"'),
    ]
)
SCALARS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
    st.booleans().map(lambda value: str(value).lower()),
    st.sampled_from(["'demo'", "'vllm'", "'sglang'", "'simulated'", "''", "'./x'", "1979-05-27", "'''\n'''", "'--x'"]),
    st.just(f"'/{'x' * 300}'"),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(KEYS, inner, max_size=3).map(
            lambda table: "{" + ", ".join(f"{key} = {value}" for key, value in table.items()) + "}"
        )
    ),
    max_leaves=6,
)
LINES = st.one_of(
    st.tuples(KEYS, VALUES).map(lambda pair: f"{pair[0]} = {pair[1]}"),
    st.sampled_from(["[[models]]\nmodel = 'demo'", "[[models]]", "[router]", "[models.resources]", "[models.options]"]),
)


def plan_or_mistake(text: str) -> None:
    try:
        plan = parse_fleet("fleet.toml", text)
    except BadPlan as error:
        last = text.count("\n") + 1
        for message in str(error).splitlines():
            found = re.match(r"fleet\.toml, line (\d+): .", message)
            assert found is not None, message
            assert 1 <= int(found[1]) <= last
    else:
        assert plan.models
        assert msgspec.json.decode(encode(plan), type=FleetPlan) == plan  # a controller takes it
        check(plan)


@given(st.lists(LINES, max_size=12).map("\n".join))
def test_any_toml_is_a_plan_or_a_mistake_with_its_line(text: str) -> None:
    plan_or_mistake(text)


@given(st.data())
def test_the_example_with_anything_changed_is_a_plan_or_a_mistake(data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(EXAMPLE)))
    end = data.draw(st.integers(begin, min(len(EXAMPLE), begin + 12)))
    plan_or_mistake(EXAMPLE[:begin] + data.draw(st.text(max_size=6) | SCALARS | LINES) + EXAMPLE[end:])
