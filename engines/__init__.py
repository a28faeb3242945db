"""Knowledge of engines: one file for each, and this table of them. A new engine is a file and its line here."""

from typing import Literal, TypeAlias

from engines import native, openai, sglang, trtllm, vllm
from engines.metrics import EngineMetrics, merged
from engines.profile import EngineProfile

# Profiles by the name that descriptions of replicas have.
PROFILES: dict[str, EngineProfile] = {
    each.PROFILE.name: each.PROFILE for each in (native, vllm, sglang, trtllm, openai)
}
Launched: TypeAlias = Literal["vllm", "sglang"]  # A fleet starts those with a `server`.
SERVERS = {name: profile.server for name, profile in PROFILES.items() if profile.server is not None}
NATIVE, OPENAI = native.PROFILE, openai.PROFILE
METRICS: EngineMetrics = merged(profile.metrics for profile in PROFILES.values())  # It reads the text of any engine.


def profile_of(engine: str) -> EngineProfile:
    """The profile of this name; of an engine that is not known yet, that of any server of OpenAI's API."""
    return PROFILES.get(engine, OPENAI)


def owned_by(owner: str | None) -> EngineProfile:
    """The engine that says so of its models."""
    return next((one for one in PROFILES.values() if owner is not None and one.owner == owner), OPENAI)
