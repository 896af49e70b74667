"""The progress of a run according to its checkpoints."""

from __future__ import annotations

from titan_like.checkpoint.step_folders import checkpoint_folder, checkpoint_path, complete_steps
from titan_like.config.schema import JobConfig
from titan_like.data.batch_size import total_steps


def is_resumable(config: JobConfig) -> tuple[bool, str]:
    """Whether a run that has ended has steps left and a checkpoint to resume from, and a sentence that says so."""
    if not config.checkpoint.enable:
        return False, "not resumable: checkpoint.enable is false"
    if config.checkpoint.load_step is not None:
        return False, f"not resumable: every start goes back to checkpoint.load_step = {config.checkpoint.load_step}"
    folder, total = checkpoint_folder(config), total_steps(config.training)
    # Looked up by name, because the listing of a network file system may lag behind.
    newest = total if checkpoint_path(folder, total).is_dir() else max(complete_steps(folder), default=0)
    if newest >= total:
        return False, f"finished: a checkpoint of step {newest} of {total} is in {folder}"
    if newest == 0:
        return False, f"not resumable: no checkpoint in {folder}"
    return True, f"resumable: step {newest} of {total} is in {folder}"
