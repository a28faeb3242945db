"""The model runner of ../shared/real-vllm, for more kinds of caches. Runs inside vLLM, in an environment of its own."""

from fakevllm import FakeExecutor


class Executor(FakeExecutor):  # type: ignore[misc]
    """FAKE_KV names the kinds of its layers."""
