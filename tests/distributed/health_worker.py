"""What the processes of the tests of bad steps do."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.crash_worker import build, digest
from titan_like.config.errors import RunError
from titan_like.models.transformer import Transformer
from titan_like.train.trainer import Trainer

DIGESTED = (5, 7, 9, 10, 11, 14)  # the steps at which the tests look


def train(
    rank: int,
    folder: Path,
    dump: Path,
    settings: dict[str, Any],
    bad: dict[int, float],
    set_back: int | None = None,
    ruined_after: int | None = None,
) -> None:
    """Train where the losses of the steps that begin at some samples are multiplied. Write what came of it.

    With ``set_back`` the data cursor is moved there first. After step ``ruined_after`` the last rank's weights are NaN.
    """
    loss = Transformer.loss
    digests: dict[int, str] = {}

    class Watched(Trainer):
        def train_step(self, data: Any) -> Any:
            issued = super().train_step(data)
            if issued.step in DIGESTED:
                digests[issued.step] = digest(self)
            if issued.step == ruined_after and rank == dist.get_world_size() - 1:
                next(self.model.parameters()).detach().fill_(math.nan)
            return issued

    outcome: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer = build(folder, dump, settings, Watched)
        if set_back is not None:
            trainer.consumed_samples = set_back

        def sometimes_bad(*arguments: Any) -> torch.Tensor:
            return loss(*arguments) * bad.get(trainer.consumed_samples, 1.0)

        with patch.object(Transformer, "loss", sometimes_bad):
            try:
                trainer.train()
            except RunError as error:
                outcome["error"] = str(error)
    outcome |= {
        "step": trainer.step,
        "skipped_steps": trainer.skipped_steps,
        "consumed_samples": trainer.consumed_samples,
        "digests": digests,
        "printed": printed.getvalue(),
    }
    (dump / f"outcome_{rank}.json").write_text(json.dumps(outcome))
