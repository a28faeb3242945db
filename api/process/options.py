"""Reads settings from flags, then the environment, then a TOML file, then defaults."""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from api.model_files import read_model_file
from api.process.settings import LARGEST, Setting, Table, Unusable

F = TypeVar("F", bound=Callable[..., Any])

_FILE = "api.process.options.file"  # the context keeps the SettingsFile there
_SET = "settings"  # the parameter of --set


def option(flag: str, metavar: str, help: str, *, name: str | None = None, **rest: Any) -> Callable[[F], F]:
    """Make an option that takes a value; its help shows the default, if it has one."""
    rest = {"show_default": rest.get("default") is not None, **rest}
    return click.option(flag, *([name] if name else []), metavar=metavar, help=help, **rest)


class SettingOption(click.Option):
    """An option whose errors name the source of its value."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Refuse an empty variable: click ignores it, and a server whose key is missing would be open to everyone."""
        if isinstance(self.envvar, str) and os.environ.get(self.envvar) == "" and not ctx.resilient_parsing:
            raise Unusable(f"{self.envvar} in the environment is empty; give it a value, or unset it")
        return super().resolve_envvar_value(ctx)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        source = ctx.get_parameter_source(self.name) if ctx else None
        if source is ParameterSource.ENVIRONMENT:
            return f"{self.envvar} in the environment ({self.opts[0]})"
        if ctx and source is ParameterSource.DEFAULT_MAP:
            file: SettingsFile = ctx.meta[_FILE]
            return f"{self.name} in {file.place(self.name)}"
        return super().get_error_hint(ctx)

    def get_help_extra(self, ctx: click.Context) -> Any:
        """The default, and a range with two ends; the variable's name follows from the option's."""
        extra = super().get_help_extra(ctx)
        extra.pop("envvars", None)
        if getattr(self.type, "max", None) in (None, LARGEST):  # it is there only for the sake of the types
            extra.pop("range", None)
        if isinstance(self.default, float):
            extra["default"] = f"{self.default:g}"
        return extra


class KeyOption(SettingOption):
    """A setting without a flag: `--set KEY=VALUE` gives it, or the environment, or the file."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        pass

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        given = [value for key, _, value in (text.partition("=") for text in opts.get(_SET, ())) if key == self.name]
        if given:
            opts = {**opts, self.name: given if self.multiple else given[-1]}
        return super().consume_value(ctx, opts)

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        if isinstance(self.default, bool):
            extra["default"] = str(self.default).lower()
        return extra

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (f"{self.name}={self.metavar}", record[1])


class SettingsCommand(click.Command):
    """A command with the settings of a table as options, shown in groups."""

    def __init__(self, *arguments: Any, table: Table, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.table = table
        self.params += [config_option(table), *options_of(table)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            setting = self.table.all.get(error.option_name.removeprefix("--").replace("-", "_"))
            if setting is None:
                raise
            raise Unusable(f"{error.option_name} is no option; write --set {setting.key}=VALUE") from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = {param.name: param for param in self.get_params(ctx)}
        keys = [params.pop(setting.key) for setting in self.table.all.values() if not setting.flag]
        for title, settings in self.table.groups.items():
            self._write(ctx, formatter, title, [params.pop(setting.key) for setting in settings if setting.flag])
        self._write(ctx, formatter, "Other", list(params.values()))
        self._write(ctx, formatter, "Keys of --set", keys)

    @staticmethod
    def _write(ctx: click.Context, formatter: click.HelpFormatter, title: str, params: list[click.Parameter]) -> None:
        if params:
            with formatter.section(title):
                formatter.write_dl([record for param in params if (record := param.get_help_record(ctx))])


def options_of(table: Table) -> list[click.Parameter]:
    return [*(_option_of(setting, table) for setting in table.all.values()), _set_option(table)]


def _option_of(setting: Setting, table: Table) -> click.Option:
    default = default_of(setting, table)
    flag = setting.type is click.BOOL and setting.flag
    return (SettingOption if setting.flag else KeyOption)(
        [f"{setting.option}/--no-{setting.option[2:]}" if flag else setting.option, setting.key],
        type=setting.type,
        metavar=None if flag else "true|false" if setting.type is click.BOOL else setting.metavar,
        help=setting.help,
        envvar=setting.variable,
        required=setting.required,
        multiple=setting.multiple,
        show_default=not (flag and default is False),
        **({} if default in (None, "", ()) and not flag else {"default": default}),  # a flag may be neither
    )


def default_of(setting: Setting, table: Table) -> Any:
    return attrgetter(setting.field)(table.defaults) if setting.field else setting.default


def _set_option(table: Table) -> click.Option:
    def check(_ctx: click.Context, _param: click.Parameter, given: tuple[str, ...]) -> None:
        for text in given:
            key, equals, _ = text.partition("=")
            setting = table.all.get(key)
            if setting is None:
                raise Unusable(f"--set {text}: {_no_setting(key, table)}")
            if setting.flag or not equals:
                raise Unusable(f"--set {text}: write {setting.option}{'' if setting.flag else '=VALUE'} instead")

    return click.Option(
        ["--set", _SET],
        metavar="KEY=VALUE",
        multiple=True,
        expose_value=False,
        callback=check,
        help="A setting without an option of its own, see below. May be repeated.",
    )


def config_option(table: Table) -> click.Option:
    return SettingOption(
        ["--config"],
        type=click.Path(),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        envvar="WARMROUTE_CONFIG",
        callback=lambda ctx, _, path: read_file(ctx, path, table),
        help="A TOML file of settings.",
    )


def nested_fields(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with a field in the configuration, as nested objects, without those not given."""
    nested: dict[str, Any] = {}
    for setting in table.all.values():
        if setting.field and values[setting.key] is not None:
            *parents, name = setting.field.split(".")
            inner = nested
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[name] = values[setting.key]
    return nested


class SettingsFile(NamedTuple):
    """The text of a TOML file, so that an error can name the line."""

    path: str
    text: str

    def place(self, key: str) -> str:
        """The file and the line that begins with the key, as a value or a table."""
        found = re.search(rf"""^[ \t]*(?:\[*[ \t]*)["']?{re.escape(key)}["']?[ \t]*[=.\]]""", self.text, re.MULTILINE)
        if found is None:
            return self.path
        line = self.text.count("\n", 0, found.start()) + 1
        return f"{self.path}, line {line}"


def read_file(ctx: click.Context, path: str | None, table: Table) -> None:
    """Make the file's values the defaults of all other options."""
    if path is None:
        return
    try:
        file = SettingsFile(path, read_model_file(Path(path)))
        values = tomllib.loads(file.text)
    except tomllib.TOMLDecodeError as error:
        raise Unusable(f"{path} is not TOML: {error}") from error
    except (OSError, ValueError) as error:
        raise Unusable(f"--config: cannot read {path!r}: {getattr(error, 'strerror', None) or error}") from error
    for key, value in values.items():
        setting = table.all.get(key)
        if setting is None:
            raise Unusable(f"{file.place(key)}: {_no_setting(key, table)}")
        kind, word = _toml_type(setting.type)
        if setting.multiple:
            right = isinstance(value, list) and all(_is(item, kind) for item in value)
            word = f"a list of {word}"
        else:
            right = _is(value, kind)
        if not right:
            quoted = f"no {word.removesuffix(' in quotes')}" if setting.secret else repr(value)
            raise Unusable(f"{file.place(key)}: {key} is {quoted}; write {word}")
    ctx.meta[_FILE] = file
    ctx.default_map = values


def _no_setting(key: str, table: Table) -> str:
    near = get_close_matches(key.replace("-", "_"), table.all, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"`{table.command} --help` lists the settings"
    return f"{key!r} is not a setting; {hint}"


def _is(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _toml_type(kind: click.ParamType[Any]) -> tuple[type | tuple[type, ...], str]:
    if kind is click.BOOL:
        return bool, "true or false"
    if isinstance(kind, click.IntRange):
        return int, "a whole number"
    if isinstance(kind, click.FloatRange):
        return (int, float), "a number"
    return str, "text in quotes"
