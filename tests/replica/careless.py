"""Negative controls: a property has to fail for a world that leaves out a precaution."""

from typing import Any

from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine
from hypothesis.stateful import run_state_machine_as_test as run_machine


def run_careless(world: type[RuleBasedStateMachine], **changes: Any) -> None:
    """Run many examples, of which none is made smaller."""
    many = settings(
        max_examples=400, phases=(Phase.generate,), database=None, report_multiple_bugs=False, derandomize=True
    )
    run_machine(type("CarelessWorld", (world,), changes), settings=many)
