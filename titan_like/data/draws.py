"""Random numbers that depend on a sample alone, so that every layout and every resumed run draws the same."""

from __future__ import annotations

import hashlib

import numpy as np


def sample_generator(purpose: bytes, seed: int, index: int) -> np.random.Generator:
    """A generator for one purpose (at most 16 bytes) in sample ``index`` of a run with this seed."""
    digest = hashlib.blake2b(repr((seed, index)).encode(), digest_size=16, person=purpose).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
