"""`python -m tests.replica.disk.writer FOLDER`: for each line of input, fork a process that writes without end.

The process prints its id, then `SLOT IDENTITY` after each record; `dead` is printed when somebody has killed it.
"""

import os
import random
import sys
from pathlib import Path

from tests.replica.disk.disks import NUM_SLOTS, opened, record, write


def write_without_end(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    with opened(folder) as file:
        identity = file.recover().last_identity
        while True:
            slot, identity = chance.randrange(NUM_SLOTS), identity + 1
            assert write(file, slot, record(identity))
            say(f"{slot} {identity}")


def say(line: str) -> None:
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def main() -> None:
    for seed, _ in enumerate(sys.stdin):
        child = os.fork()
        if not child:
            say(str(os.getpid()))
            write_without_end(Path(sys.argv[1]), seed)
        os.waitpid(child, 0)
        say("dead")


if __name__ == "__main__":
    main()
