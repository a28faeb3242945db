"""A server of OpenAI's API of which nothing more is known."""

from engines.profile import EngineProfile

PROFILE = EngineProfile(name="openai")
