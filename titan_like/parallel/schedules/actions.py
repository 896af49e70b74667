"""What a pipeline schedule is made of."""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    """One computation of one stage.

    ``kind`` is F (forward), B (whole backward), or B's two halves: I (gradient of the stage's input), which the stage
    before waits for, and W (gradients of the weights), which nobody waits for and which can fill idle time.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


Table = list[list[Action]]
"""Per pipeline rank, its actions in the order of execution, without idle slots."""


def outcome(action: Action) -> Action:
    """The action under whose name others wait for the result: B also gives what I gives."""
    return action._replace(kind="I") if action.kind == "B" else action


def inputs(action: Action, num_stages: int) -> list[Action]:
    """The actions whose outcome this one needs."""
    kind, stage, microbatch = action
    if kind == "W":
        return [Action("I", stage, microbatch)]
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage > 0 else []
    own_forward = Action("F", stage, microbatch)
    return [own_forward, Action("I", stage + 1, microbatch)] if stage + 1 < num_stages else [own_forward]
