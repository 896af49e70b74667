"""The elements of a pipeline schedule: actions, their inputs and their outcomes."""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    """One computation of one stage.

    ``kind`` is F (forward), B (whole backward), or one of B's two halves. I computes the gradient of the stage's input,
    for which the previous stage waits. W computes the gradients of the weights; no stage waits for it, so it can fill
    idle time.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


Table = list[list[Action]]
"""Per pipeline rank, its actions in the order of execution, without idle slots."""


def outcome(action: Action) -> Action:
    """The action under whose name others wait for the result: I for a B, because B also computes what I does."""
    return action._replace(kind="I") if action.kind == "B" else action


def inputs(action: Action, num_stages: int) -> list[Action]:
    """The actions whose outcomes this one needs before it can start."""
    kind, stage, microbatch = action
    if kind == "W":
        return [Action("I", stage, microbatch)]
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage > 0 else []
    own_forward = Action("F", stage, microbatch)
    return [own_forward, Action("I", stage + 1, microbatch)] if stage + 1 < num_stages else [own_forward]
