"""`python -m fleet.host.bound PROGRAM ...` becomes that program, and dies with the process that started it."""

import os
import sys

from api.process.lifeline import die_with_parent, parent_pid


def main(command: list[str]) -> None:
    die_with_parent(parent_pid())
    try:
        os.execvp(command[0], command)  # the kernel keeps the promise across exec
    except OSError as error:
        sys.exit(f"Error: cannot start {command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
