"""Whether dropout drew the right masks on every process. Pure functions over digests."""

from __future__ import annotations

from collections.abc import Iterable

from titan_like.config.schema import JobConfig
from titan_like.models.registry import model_config
from titan_like.verify.axes import num_microbatches
from titan_like.verify.checks import EPS, REPORTED, Check
from titan_like.verify.results import DropoutSeen, Mask, Truth

_Identity = tuple[object, ...]


def check_dropout(config: JobConfig, truth: Truth, runs: list[DropoutSeen]) -> list[Check]:
    """The rows of a run with dropout."""
    wanted = truth.validation[0]
    losses = [(abs(run.validation[0] - wanted) / abs(wanted), run) for run in runs]
    worst, run = max(losses, key=lambda pair: pair[0])
    off = Check(
        "no dropout in validation", worst <= REPORTED, worst, REPORTED,
        detail=f"rank {run.rank} reports {run.validation[0]:.9g}, not {wanted:.9g}",
    )  # fmt: skip
    checks = [_sites(config, runs), *_identities(config, runs), _recomputed(config, runs), off]
    if config.activation_checkpoint.mode != "none":
        checks.append(_recompute_changes_nothing(runs))
    return checks


def _forward(run: DropoutSeen) -> list[Mask]:
    return [mask for mask in run.masks if not mask.is_recomputed]


def _wrong(name: str, problems: list[str]) -> Check:
    return Check(name, not problems, len(problems), 0, detail=problems[0] if problems else "")


def _sites(config: JobConfig, runs: list[DropoutSeen]) -> Check:
    """Every layer draws as often as every other, once in each microbatch."""
    problems = []
    num_layers = model_config(config.model).num_layers
    layers: dict[int, set[str]] = {layer: set() for layer in range(num_layers)}
    outside: set[str] = set()
    for run in runs:
        for mask in _forward(run):
            parts = mask.site.split(".")
            if parts[0] == "layers":
                layers[int(parts[1])].add(".".join(parts[2:]))
            else:
                outside.add(mask.site)
    everywhere = set.union(*layers.values())
    for layer, sites in layers.items():
        problems += [f"layer {layer} draws nothing after {site}" for site in sorted(everywhere - sites)]
    if not everywhere or not outside:
        problems.append("no layer draws dropout" if not everywhere else "the embedding draws no dropout")
    for run in runs:
        count: dict[tuple[str, int], int] = {}
        for mask in _forward(run):
            count[mask.site, mask.step] = count.get((mask.site, mask.step), 0) + 1
        for (site, step), times in count.items():
            expected = num_microbatches(config)
            if times % expected:
                problems.append(f"rank {run.rank} draws {times} times after {site} in step {step + 1}, not {expected}")
    return _wrong("dropout in every layer and microbatch", problems)


def _identities(config: JobConfig, runs: list[DropoutSeen]) -> list[Check]:
    """Masks of the same activations are equal, and no two of different activations are."""
    equal: list[str] = []
    different: list[str] = []
    by_identity: dict[_Identity, tuple[str, int]] = {}
    by_digest: dict[tuple[tuple[int, ...], str], tuple[_Identity, int]] = {}
    streams: dict[str, tuple[_Identity, int]] = {}
    for run in runs:
        for identity, shape, stream, digest in _parts(config, run):
            if stream is not None:  # two draws that begin at one place of a stream need not have the same shape
                other, other_rank = streams.setdefault(stream, (identity, run.rank))
                if other != identity:
                    clause = f"from the random numbers of {_name(other)} on rank {other_rank}"
                    different.append(f"{_name(identity)} on rank {run.rank} is drawn {clause}")
            known, first_rank = by_identity.setdefault(identity, (digest, run.rank))
            if known != digest:
                equal.append(f"{_name(identity)} is drawn otherwise on rank {run.rank} than on rank {first_rank}")
                continue
            other, other_rank = by_digest.setdefault((shape, digest), (identity, run.rank))
            if other != identity:
                different.append(f"{_name(identity)} on rank {run.rank} is that of {_name(other)} on rank {other_rank}")
    return [
        _wrong("dropout equal where activations are", equal),
        _wrong("dropout different where activations are", different),
    ]


def _parts(config: JobConfig, run: DropoutSeen) -> Iterable[tuple[_Identity, tuple[int, ...], str | None, str]]:
    """Each sample's (and head's) mask with what it is a mask of: equal identities are the same activations.

    As (identity, shape, where in which stream the draw began if this is its first part, digest).
    """
    model, seq_len = model_config(config.model), config.training.seq_len
    data_rank = tuple(place for name, place in run.coordinates.items() if name.startswith("dp"))
    tensor_rank = run.coordinates.get("tp", 0)
    for mask in _forward(run):
        where: list[tuple[int, int | str]]
        if mask.is_attention:
            _, heads, *area = mask.shape
            first_head = tensor_rank * heads if heads < model.num_attention_heads else 0
            where = [(part // heads, first_head + part % heads) for part in range(len(mask.parts))]
        else:
            _, length, *rest = mask.shape
            area = [length, *rest]
            place = tensor_rank if length < seq_len else "whole"
            where = [(part, place) for part in range(len(mask.parts))]
        for number, ((sample, within), digest) in enumerate(zip(where, mask.parts, strict=True)):
            identity = (mask.site, mask.step, data_rank, mask.microbatch, sample, within, mask.is_attention)
            yield identity, tuple(area), None if number else mask.stream, digest


def _name(identity: _Identity) -> str:
    site, step, data_rank, microbatch, sample, within, is_attention = identity
    assert isinstance(step, int)
    what = f", head {within}" if is_attention else "" if within == "whole" else f", part {within} of the sequence"
    return (
        f"the mask after {site} (step {step + 1}, data rank {data_rank}, microbatch {microbatch}, "
        f"sample {sample}{what})"
    )


def _recomputed(config: JobConfig, runs: list[DropoutSeen]) -> Check:
    problems = []
    for run in runs:
        drawn = {(mask.site, mask.step, mask.parts) for mask in _forward(run)}
        again = [mask for mask in run.masks if mask.is_recomputed]
        for mask in again:
            if (mask.site, mask.step, mask.parts) not in drawn:
                clause = f"after {mask.site} (step {mask.step + 1}) a mask that no forward pass drew"
                problems.append(f"rank {run.rank} recomputes {clause}")
    return _wrong("dropout drawn again in recomputation", problems)


def _recompute_changes_nothing(runs: list[DropoutSeen]) -> Check:
    worst, name, rank = max((difference, name, run.rank) for run in runs for name, difference in run.recompute.items())
    tolerance = 2.0**16 * EPS["float64"]
    return Check(
        "gradients with dropout, recomputed or not", worst <= tolerance, worst, tolerance, name,
        f"differs by {worst:.3g} on rank {rank}",
    )  # fmt: skip
