"""How hard the property tests try (`--hypothesis-profile=thorough` for the slow tier), and a Ctrl-C that arrives."""

import signal

from hypothesis import HealthCheck, Phase, settings

QUICK_TO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
COMMON = settings(deadline=None, phases=QUICK_TO_SHRINK, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("default", COMMON, max_examples=60)
settings.register_profile("thorough", COMMON, max_examples=1000)
settings.load_profile("default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` has it, and the programs under test would
    signal.signal(signal.SIGINT, signal.default_int_handler)
