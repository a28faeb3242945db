"""Adapters of an engine that a test steps, loaded and unloaded as its loop does it."""

from pathlib import Path

from replica.engine.engine import Engine
from replica.lora.shelf import Shelf
from replica.messages import AdapterChanged, LoadAdapter, UnloadAdapter
from tests.events.processes import wait_until


def shelf_of(engine: Engine) -> Shelf:
    assert engine.shelf is not None
    return engine.shelf


def load(engine: Engine, name: str, folder: Path) -> str:
    """Load, and return why it could not be, or nothing."""
    refused = shelf_of(engine).load(LoadAdapter(7, name, str(folder)))
    if refused is not None:
        return refused.error
    done: list[AdapterChanged] = []

    def is_done() -> bool:
        done.extend(engine.settle_adapters())
        return bool(done)

    wait_until(is_done, "it has been read")
    assert [changed.id for changed in done] == [7]
    return done[0].error


def unload(engine: Engine, name: str) -> str:
    error = shelf_of(engine).unload(UnloadAdapter(8, name)).error
    engine.settle_adapters()
    return error
