"""What the server of `processes` does before it forks them: it imports what they use and reads the tables.

It starts no thread and leaves the GPUs alone, since neither outlives a fork.
"""

import gc
from contextlib import suppress


def _preload() -> None:
    import torch.distributed.checkpoint
    import torch.utils.serialization  # noqa: F401  torch.load imports it

    import titan_like.optim.optimizer
    import titan_like.parallel.pipeline
    import titan_like.train.job
    import titan_like.verify.observe  # noqa: F401
    from titan_like.config.entry_points import names_of
    from titan_like.metrics.devices import known_device
    from titan_like.models.packages import module_beside
    from titan_like.models.registry import config_class, flavors
    from titan_like.models.transformer import Transformer
    from titan_like.torch_private import import_compiler

    import_compiler()
    known_device("none")
    for family in names_of("model.family"):
        with suppress(Exception):  # a broken family of another package, which concerns only its own runs
            flavors(family)
            module_beside(config_class(family).family_module("model").build, Transformer, "sharding")


gc.disable()  # the imports make 400,000 objects, hardly any of them garbage
_preload()
gc.freeze()  # collections in the forked processes need not look at them, which would also copy their memory
gc.enable()
