"""A follower on a CPU: `python -m tests.replica.device.follower CHANNEL_FD PARENT_PID`."""

import os
import sys

from replica.device.follower import main
from tests.replica.device.hosts import HostAccelerator

if __name__ == "__main__":
    os._exit(main(sys.argv[1:], lambda _: HostAccelerator(), "gloo"))
