"""TensorRT-LLM, of which only the events are known, by its documentation: maps, tokens as digits, and `mm_keys`.

`events.messages` reads these like any engine's. Its sockets are named to the router; all else is as in any server of
OpenAI's API.
"""

from engines.profile import EngineProfile

PROFILE = EngineProfile(name="trtllm")
