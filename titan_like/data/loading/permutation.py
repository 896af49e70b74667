"""Pseudo-random permutations and numbers, computed from a key one by one."""

import hashlib
import struct

import numpy as np

_ROUNDS = 8  # even; four make a pseudo-random permutation of a large domain, a small one needs more
_LEAST_BITS = 6  # halves of one or two bits have too few values
_WORD = (1 << 64) - 1


class Permutation:
    """A keyed bijection of 0 … size - 1, in constant memory and time for any size.

    A Feistel network permutes the numbers of b bits, the smallest b with 2^b ≥ size, and is applied again while the
    result is not below size (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
    That needs fewer than two applications on average, unless size is below 32. The result is pseudo-random but
    not a cipher: the rounds mix by multiplication.
    """

    def __init__(self, size: int, *key: object) -> None:
        """``key``: anything with a distinct ``repr``, such as a seed and an epoch."""
        self.size = size
        bits = max(_LEAST_BITS, (size - 1).bit_length())
        self._low = bits // 2
        self._masks = (1 << bits - self._low) - 1, (1 << self._low) - 1
        digest = hashlib.shake_128(repr((size, key)).encode()).digest(8 * _ROUNDS)
        self._keys = struct.unpack(f"<{_ROUNDS}Q", digest)

    def __len__(self) -> int:
        return self.size

    def __call__(self, index: int) -> int:
        """The element at ``index``, from 0 to size - 1."""
        shift, (high_mask, low_mask), keys = self._low, self._masks, self._keys
        while True:
            high, low = index >> shift, index & low_mask
            for number in range(0, _ROUNDS, 2):
                # The halves keep their widths, which differ by one for an odd number of bits.
                mixed = (low + keys[number]) * 0x9E3779B97F4A7C15 & _WORD
                mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _WORD
                high ^= (mixed >> 32) & high_mask
                mixed = (high + keys[number + 1]) * 0x9E3779B97F4A7C15 & _WORD
                mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _WORD
                low ^= (mixed >> 32) & low_mask
            index = high << shift | low
            if index < self.size:
                return index


def sample_generator(purpose: bytes, seed: int, index: int) -> np.random.Generator:
    """A generator for one purpose (at most 16 bytes) in sample ``index`` of a run with this seed."""
    digest = hashlib.blake2b(repr((seed, index)).encode(), digest_size=16, person=purpose).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
