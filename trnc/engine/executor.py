"""What the engine's loops drive: something that runs step plans. `trnc.runtime` has one."""

from __future__ import annotations

from typing import Protocol

from trnc.core import ExecutorInfo, StepPlan, StepResult


class StepHandle(Protocol):
    """A step in flight."""

    def result(self) -> StepResult:
        """Wait for the step and return what it picked; raises what the step raised."""


class Executor(Protocol):
    """Runs steps one after the other, in the order of `submit`; owned by one thread."""

    @property
    def info(self) -> ExecutorInfo:
        """The limits that plans must keep."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue one step and return at once."""

    def compiles_after_ready(self) -> int:
        """Return how many stages were compiled since the executor said it was ready."""

    def close(self) -> None:
        """Free the device and join what runs."""
