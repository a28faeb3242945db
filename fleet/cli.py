"""The `warmroute` command: finds the sub-command, imports only that one, and reports what cannot run.

A new sub-command is one line in COMMANDS; a new optional dependency is one line in EXTRAS.
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import click

from fleet.output import mute_stdout

PACKAGES = ("events", "api", "engines", "kernels", "replica", "router", "fleet", "lab")
OUR_ROOT = Path(__file__).resolve().parent.parent


def hidden() -> list[str]:
    """Return an error for each of our packages, which have general names, that Python would import from elsewhere."""
    found = {name: spec.origin for name in PACKAGES if (spec := find_spec(name)) is not None}
    return [
        f"Error: warmroute's {name} is hidden by {origin}. Install warmroute in an environment of its own: "
        "python -m venv warmroute-env"
        for name, origin in found.items()
        if origin is not None and not Path(origin).resolve().is_relative_to(OUR_ROOT)
    ]


try:
    from events.lazy import LazyGroup
except ImportError:
    if not hidden():
        raise
    sys.exit("\n".join(hidden()))

COMMANDS = {
    "analyze": ("lab.commands.analyze:analyze", "Analyze how much prompts share, and what breaks sharing."),
    "bench": ("lab.commands.bench:bench", "Send requests to an endpoint as users would, and measure its latencies."),
    "chat": ("lab.commands.chat:chat", "Talk to a model in the terminal, and see what was cached, and where."),
    "demo": ("lab.commands.chat:demo", "Show in a minute what a warm cache saves, and how an answer survives a kill."),
    "doctor": ("lab.commands.doctor:doctor", "Diagnose a router, and name the setting to change."),
    "down": ("fleet.commands.down:down", "End a fleet, on this machine or elsewhere."),
    "drain": ("fleet.commands.drain:drain", "Stop or resume sending new requests to a replica."),
    "events": ("events.cli:events", "Read, check, record and replay the cache events of replicas."),
    "explain": ("fleet.commands.router:explain", "Show where a router would send a request now, and why."),
    "fetch": ("replica.cli:fetch", "Put the files of a model into a folder, for replicas or routers to read."),
    "logs": ("fleet.commands.logs:logs", "Show the log of a replica."),
    "picker": ("router.process.cli:picker", "Pick the replica of each request that a gateway forwards."),
    "prove": ("lab.commands.prove:prove", "Prove what was cached behind any router, and what its routing lost."),
    "replica": ("replica.cli:replica", "Serve a model from one engine with a prefix cache."),
    "restart": ("fleet.commands.change:restart", "Replace a model's replicas one by one, losing no request."),
    "router": (
        "router.process.cli:router",
        "Answer the OpenAI API from many replicas, each request with a warm cache.",
    ),
    "scale": ("fleet.commands.change:scale", "Change how many replicas a model has."),
    "shadow": (
        "lab.commands.shadow:shadow",
        "Stand beside a router of any kind, and tell what warmroute would have gained.",
    ),
    "simulate": ("lab.commands.simulate:simulate", "Compare policies on a trace, in virtual time."),
    "size": ("lab.commands.size:size", "Compute how much KV cache fits beside a model on a device."),
    "status": ("fleet.commands.status:status", "Show a fleet's models and replicas, and how busy they are."),
    "usage": ("fleet.commands.router:usage", "Show how many tokens each API key has used, by day and model."),
    "top": ("fleet.commands.router:top", "Watch a router live: replicas, event streams, decisions, sessions."),
    "up": ("fleet.up.command:up", "Start replicas, here or over a Ray cluster, and a router with the OpenAI API."),
}

EXTRAS = {
    "gguf": "replica",
    "google": "picker",
    "hpack": "picker",
    "huggingface_hub": "hub",
    "opentelemetry": "tracing",
    "ray": "ray",
    "safetensors": "replica",
    "torch": "replica",
}
WITHOUT_A_MODEL = {"warmroute replica": "--model demo --engine simulated", "warmroute up": "--simulated"}

COMPLETE_VAR = "_WARMROUTE_COMPLETE"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@click.group(
    cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(None, "--version", package_name="warmroute", message="%(prog)s %(version)s")
def warmroute() -> None:
    """Serve a language model from many replicas, and send each request to the one whose cache is warm."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; every error that a user can act on becomes one line here."""
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):  # a terminal gets escapes for letters that it lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        # A message would land in the line being typed.
        errors = [] if COMPLETE_VAR in os.environ else hidden()
        for line in errors:
            complain(line)
        status = 1 if errors else run(arguments)
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        status = INTERRUPTED
    except BrokenPipeError:
        mute_stdout()
        status = 1
    except click.ClickException as error:
        with contextlib.suppress(OSError):  # the reader is gone
            error.show()
        status = error.exit_code
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        mute_stdout()
        complain(f"Error: cannot write the output: {error.strerror}")
        status = 1
    except ImportError as error:
        words = sys.argv[1:] if arguments is None else arguments
        explanation = explain(error, f"warmroute {words[0]}")
        if explanation is None:
            raise
        complain(explanation)
        status = 1
    sys.exit(status)


def complain(line: str) -> None:
    with contextlib.suppress(OSError):  # the reader is gone
        click.echo(line, err=True)


def open_missing_streams() -> None:
    """Give what was started without stdin, stdout or stderr an empty one, before a socket takes its number."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(nothing := os.open(os.devnull, os.O_RDWR), descriptor)
            if nothing != descriptor:
                os.close(nothing)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def run(arguments: Sequence[str] | None) -> int:
    """Run the command; an int that it returns is its exit status."""
    result = warmroute.main(arguments, "warmroute", complete_var=COMPLETE_VAR, standalone_mode=False)
    return result if isinstance(result, int) else 0


def explain(error: ImportError, command: str) -> str | None:
    """Say which extra is missing or broken and how to get it; None when the bug is ours."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return None
    missing = isinstance(error, ModuleNotFoundError) and error.name == module
    problem = "which is not installed." if missing else f"which is broken: {error}."
    explanation = f"{command} needs {module}, {problem} Install it with: pip install 'warmroute[{EXTRAS[module]}]'"
    if EXTRAS[module] == "replica" and command in WITHOUT_A_MODEL:
        explanation += f"\nOr make up the text of answers, without a model: {command} {WITHOUT_A_MODEL[command]}"
    return explanation
