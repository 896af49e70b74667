"""Which positions of a sequence each of the processes that share it holds: pure functions."""

from __future__ import annotations

import torch


def places_of(length: int, size: int, rank: int) -> torch.Tensor:
    """The positions of a sequence that a process holds, in ascending order: int64 [length / size].

    Of 2 · size pieces they are number ``rank`` from the head and from the tail. ``length`` is a multiple of that.
    """
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat((pieces[rank], pieces[-1 - rank]))


def joined(slices: torch.Tensor) -> torch.Tensor:
    """Put all processes' slices together: [size, …, positions of a slice, n] → [size, …, all positions in order, n]."""
    head, tail = slices.chunk(2, -2)
    return torch.cat((*head.unbind(), *tail.flip(0).unbind()), -2)


def divided(whole: torch.Tensor, size: int) -> torch.Tensor:
    """The reverse of `joined`: […, positions, n] → [size, …, positions of a slice, n]."""
    pieces = whole.chunk(2 * size, -2)
    return torch.stack([torch.cat((pieces[rank], pieces[-1 - rank]), -2) for rank in range(size)])
