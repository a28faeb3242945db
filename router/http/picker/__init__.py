"""An endpoint picker for gateways: it says where a request should go, and watches the answer go by."""

import os

# Read when gRPC begins. Its handlers of fork() kill children that are started while it is at work, before they run.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
