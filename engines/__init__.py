"""Knowledge of engines: a file for each of which much is known, and this table. A new engine is a file and its line."""

from typing import Literal, TypeAlias

from engines import native, sglang, vllm
from engines.metrics import EngineMetrics, merged
from engines.profile import EngineProfile

# Of TensorRT-LLM only the events are known, by its documentation. `events.messages` reads them like any engine's, and
# its sockets are named to the router.
TRTLLM = EngineProfile(name="trtllm")
NATIVE, OPENAI = native.PROFILE, EngineProfile(name="openai")  # Of the last one nothing more is known.
# Profiles by the name that descriptions of replicas have.
PROFILES = {each.name: each for each in (NATIVE, vllm.PROFILE, sglang.PROFILE, TRTLLM, OPENAI)}
Launched: TypeAlias = Literal["vllm", "sglang"]  # A fleet starts those with a `server`.
SERVERS = {name: profile.server for name, profile in PROFILES.items() if profile.server is not None}
METRICS: EngineMetrics = merged(profile.metrics for profile in PROFILES.values())  # It reads the text of any engine.


def profile_of(engine: str) -> EngineProfile:
    """The profile of this name; of an engine that is not known yet, that of any server of OpenAI's API."""
    return PROFILES.get(engine, OPENAI)


def owned_by(owner: str | None) -> EngineProfile:
    """The engine that says so of its models."""
    return next((one for one in PROFILES.values() if owner is not None and one.owner == owner), OPENAI)
