"""`warmroute replica`: one engine and its HTTP server. Its options are the rows of `replica.settings`."""

import click

from api.lifeline import die_with_parent, parent_pid
from api.options import SettingsCommand
from replica.config import ReplicaConfig
from replica.configure import config_from
from replica.settings import TABLE


@click.command(cls=SettingsCommand, table=TABLE)
@click.pass_context
def replica(ctx: click.Context, /, **_: object) -> int:
    """Serve a model from one engine with a prefix cache, over the OpenAI API.

    Every option is also an environment variable, and a key of the --config file: --max-num-seqs is
    WARMROUTE_MAX_NUM_SEQS there and max_num_seqs here. The command line wins over the environment, the environment
    over the file.

    \b
    Examples:
      warmroute replica --model demo
      warmroute replica --model path/to/model --dtype bfloat16 --kv-cache-gb 8
      warmroute replica --model demo --engine simulated --port 0 --events-port 0
      WARMROUTE_API_KEY=secret warmroute replica --config replica.toml

    SIGTERM and Ctrl-C let running requests finish, for as long as --drain-timeout says; a second one ends them.
    Exit status: 0 ended as asked, 1 could not start or the engine failed, 2 a setting cannot be used.
    """
    config = config_from(ctx)
    if config.die_with_parent:
        die_with_parent(parent_pid())
    if config.tokenizer is None and ctx.params["model"] != "demo":
        click.echo(f"Note: {no_tokenizer(ctx.params['model'], config)}", err=True)
    from replica.server import serve  # a web framework: not needed to refuse a setting

    return serve(config)


def no_tokenizer(model: str, config: ReplicaConfig) -> str:
    said = f"{model!r} is no folder with a tokenizer.json, and there is no --tokenizer: a token is a byte"
    if config.engine.engine == "simulated":
        return said
    return f"{said}, which this model hardly understands; prompts of token ids are not touched"
