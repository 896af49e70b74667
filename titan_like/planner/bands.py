"""How far a predicted step time may be off: the band that nine in ten measured steps lie in.

A profile's own band comes from rows left out of its fit. It is wider where a profile is asked about what it was not
fitted on. benchmarks/bands.py measures by how much: it fits profiles without all rows of a kind, and predicts these.
"""

import math

from titan_like.planner.profile import Profile
from titan_like.planner.workload import Workload

# 90th percentiles of absolute errors on rows that differ in this from the fitted rows.
UNSEEN = {"another GPU": 0.34, "more GPUs": 0.21, "experts": 0.34, "another type": 0.26}
_LARGEST = 0.9  # errors are relative to the measured time, so 1 would mean that nothing is known


def band(work: Workload, profile: Profile) -> float:
    """The error, relative to the measured time, that nine in ten steps stay below. Causes add up as if independent."""
    causes = [profile.error_p90, *(UNSEEN[name] for name in unseen(work, profile))]
    return min(math.hypot(*causes), _LARGEST)


def unseen(work: Workload, profile: Profile) -> list[str]:
    """In what a run differs from the runs that a profile was fitted on."""
    nodes, fitted = (-(-gpus // profile.gpus_per_node) for gpus in (work.num_gpus, profile.most_gpus))
    differs = {
        "another GPU": profile.device.name not in (profile.fitted_gpus or (profile.device.name,)),
        "more GPUs": nodes > fitted or work.num_gpus > profile.most_gpus == 1,
        "experts": work.has_experts and not profile.fitted_experts,
        "another type": work.dtype != profile.dtype,
    }
    return [name for name, is_unseen in differs.items() if is_unseen]
