"""How hard the property tests try, and a Ctrl-C that arrives.

They try the same examples every time, so that no change fails by chance; `make search` is for those nobody has tried.
"""

import os
import signal

from hypothesis import HealthCheck, Phase, settings

QUICK_TO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
COMMON = settings(deadline=None, phases=QUICK_TO_SHRINK, suppress_health_check=[HealthCheck.too_slow])

# Workers share the cores, and torch's threads would spin until each of them had had its turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("default", COMMON, max_examples=60, derandomize=True)
settings.register_profile("thorough", COMMON, max_examples=400, derandomize=True)
settings.register_profile("search", COMMON, max_examples=5000)
settings.load_profile("default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` has it, and the programs under test would
    signal.signal(signal.SIGINT, signal.default_int_handler)
