"""Packages that take seconds to import, imported when a test uses them: each worker of a run reads every test file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import anthropic as anthropic
    import openai as openai
    import transformers as transformers


class Late:
    """A module that is imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest_")):  # pytest asks everything in a test file whether it is a test
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


if not TYPE_CHECKING:
    anthropic, openai, transformers = map(Late, ("anthropic", "openai", "transformers"))
