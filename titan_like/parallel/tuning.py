"""Sizes of the pieces in which a run works, communicates and draws its initial weights."""

from dataclasses import dataclass

from titan_like.models.layers.init import BLOCK_ELEMENTS
from titan_like.parallel.split import GRADIENT_UNIT_BYTES


@dataclass(frozen=True)
class Tuning:
    """Small runs that represent large ones use smaller pieces, so that they have as many pieces.

    Other sizes change the order of sums, and `initial_elements` the initial weights.
    """

    layer_bytes: int | None = None  # of the layers that share a unit of communication; None: `LAYER_UNIT_BYTES`
    gradient_bytes: int = GRADIENT_UNIT_BYTES  # of gradients in a 16-bit dtype that wait to be added up
    loss_logits: int | None = None  # of a chunk of the loss; None: chosen by device
    offload_bytes: int = 1 << 20  # of the smallest tensor that `activation_checkpoint.offload` moves to the host
    layers_on_device: int = 1  # of the model's last layers, which keep their tensors then
    initial_elements: int = BLOCK_ELEMENTS  # of initial weights that one generator draws


DEFAULT_TUNING = Tuning()
