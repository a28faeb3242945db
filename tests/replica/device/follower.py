"""A follower on a CPU: `python -m tests.replica.device.follower CHANNEL_FD PARENT_PID`."""

import os
import sys

import torch

from replica.device.follower import main
from tests.replica.device.hosts import HostAccelerator

if __name__ == "__main__":
    torch.set_num_threads(1)  # the others compute, too
    os._exit(main(sys.argv[1:], lambda _: HostAccelerator(), "gloo"))
