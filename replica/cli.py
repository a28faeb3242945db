"""`warmroute replica`: one engine and its HTTP server. Its options are the rows of `replica.settings`."""

import os
from importlib.util import find_spec

import click

from replica.lifeline import die_with_parent
from replica.options import SettingsCommand
from replica.settings import Unusable, config_from

# Set by a parent that wants to be outlived by nobody: its pid. Without it, one that died meanwhile is not missed.
PARENT_VARIABLE = "WARMROUTE_PARENT_PID"


@click.command(cls=SettingsCommand)
@click.pass_context
def replica(ctx: click.Context, /, **_: object) -> int:
    """Serve a model from one engine with a prefix cache, over the OpenAI API.

    Every option is also an environment variable, and a key of the --config file: --max-num-seqs is
    WARMROUTE_MAX_NUM_SEQS there and max_num_seqs here. The command line wins over the environment, the environment
    over the file.

    \b
    Examples:
      warmroute replica --model demo --engine simulated
      warmroute replica --model demo --engine simulated --port 0 --events-port 0 --num-blocks 2048
      WARMROUTE_API_KEY=secret warmroute replica --config replica.toml

    SIGTERM and Ctrl-C let running requests finish, for as long as --drain-timeout says; a second one ends them.
    Exit status: 0 ended as asked, 1 could not start or the engine failed, 2 a setting cannot be used.
    """
    config = config_from(ctx)
    if config.die_with_parent:
        die_with_parent(parent_pid())
    if config.tokenizer is None and ctx.params["model"] != "demo":
        said = f"{ctx.params['model']!r} is no folder with a tokenizer.json, and there is no --tokenizer"
        click.echo(f"Note: {said}: a token is a byte", err=True)
    if find_spec("numpy") is None:  # the engine's process would be the one to miss it, out of the dispatcher's sight
        raise ModuleNotFoundError("the engine needs numpy", name="numpy")
    from replica.server import serve  # a web framework: not needed to refuse a setting

    return serve(config)


def parent_pid() -> int:
    named = os.environ.get(PARENT_VARIABLE, str(os.getppid()))
    if not (named.isascii() and named.isdigit()):
        raise Unusable(f"{PARENT_VARIABLE} in the environment is {named!r}; make it the parent's pid, or unset it")
    return int(named)
