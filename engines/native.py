"""warmroute's own engine. Its metrics have vLLM's names where there are such, and its own for the rest."""

import msgspec

from engines.profile import EngineProfile
from engines.vllm import METRICS as VLLM

KNOWN_METRICS = "vllm"  # the family of those that dashboards know
METRICS = msgspec.structs.replace(VLLM, evicted_blocks=("warmroute:evictions_total",))

PROFILE = EngineProfile(
    name="warmroute",
    describes_itself=True,
    publishes_status=True,
    health_path="/ready",
    answers_at_once=True,
    metrics=METRICS,
    takes_envelope=True,
    names_responses=True,
    separates_salts=True,
    hand_over=b',"min_tokens":0,"stream":false}',
    shares_cache=True,
    events_advice="start it with --events, and let the router reach its sockets (--events-host)",
)
