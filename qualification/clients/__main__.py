"""Set up real clients in DIR, run them, and print a table: `python -m qualification.clients DIR [CLIENT...]`."""

import argparse
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from qualification.clients.rows import CLIENTS
from qualification.clients.running import LANGUAGES, VARIABLE, Servings, run
from qualification.clients.serving import make
from qualification.clients.verdicts import HEADING, Verdict, record


def set_up(folder: Path, names: list[str], *, update: bool) -> None:
    """Make the model and each environment that is not there yet, or whose requirements have changed."""
    make(folder / "model")
    for name in names:
        client = CLIENTS[name]
        kit = LANGUAGES[client.language]
        if update:
            kit.update(folder, name, client)
        if not kit.is_installed(folder, name):
            print(f"installing {name} {kit.version(name, client)}", flush=True)
            kit.install(folder, name)


def run_all(folder: Path, names: list[str]) -> list[Verdict]:
    print(HEADING, flush=True)
    verdicts = []
    with ExitStack() as stack:
        servings = Servings(folder, stack)
        for name in names:
            verdicts.append(run(name, folder, servings.of(name)))
            print(*verdicts[-1].lines, sep="\n", flush=True)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m qualification.clients", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where; not within the repository")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"by default all of: {', '.join(CLIENTS)}")
    parser.add_argument("--set-up-only", action="store_true", help="run nothing")
    parser.add_argument("--update", action="store_true", help="pin the newest versions first")
    parser.add_argument("--record", action="store_true", help="write the results to qualification/clients/results.json")
    args = parser.parse_args()
    if unknown := [name for name in args.clients if name not in CLIENTS]:
        parser.error(f"{unknown[0]!r} is no client; the clients are {', '.join(CLIENTS)}")
    folder: Path = args.folder.resolve()
    names: list[str] = args.clients or [*CLIENTS]
    try:
        set_up(folder, names, update=args.update)
    except (OSError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.set_up_only:
        print(f"set {VARIABLE}={folder}")
        return 0
    verdicts = run_all(folder, names)
    if args.record:
        record(verdicts)
    return 1 if any(verdict.failed for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
