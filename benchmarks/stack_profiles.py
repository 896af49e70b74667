"""Profiles of other people's stacks, beside those that the package ships, and the rows that each profile is for."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from titan_like.planner.profile import Profile, builtin_profiles, load_profile, profile_to_toml

FOLDER = Path(__file__).parent / "profiles"
SHIPPED = Path(__file__).parent.parent / "titan_like/planner/profiles"
LEFT_OUT = Path(__file__).parent / "results/profiles_left_out.json"


class Rows(NamedTuple):
    """The rows that a profile is for."""

    # The start of the GPU's name, and the first word of the notes or the start of a session's name, such as "bloom 02".
    groups: tuple[tuple[str, str], ...]
    only_zero: int | None = None  # only rows with this ZeRO stage, which some studies run on another stack


def _of(study: str, *gpus: str, only_zero: int | None = None) -> Rows:
    return Rows(tuple((gpu, study) for gpu in gpus), only_zero)


ROWS: dict[str, Rows] = {
    "dgx2_v100": _of("tf=hw96", "V100"),
    "fsdp_a100": Rows((("A100", "foundry"), ("A100", "tokens/s/gpu"))),
    "fsdp_h100": Rows((("H100", "foundry"), ("H100", "tokens/s/gpu"))),
    "jean_zay_a100": Rows((("A100", "bloom"), ("A100", "production"))),
    "jean_zay_a100_early": Rows(tuple(("A100", f"bloom 02-{day}") for day in ("1", "20", "21", "22", "23", "24"))),
    "jean_zay_v100": _of("jz_v100", "V100"),
    "jean_zay_v100_zero3": _of("jz_v100", "V100", only_zero=3),
    "megatron_bridge_experts_b200": _of("mbridge experts", "B200", "B300"),
    "megatron_bridge_experts_gb200": _of("mbridge experts new", "GB200"),
    "megatron_bridge_experts_gb200_old": _of("mbridge experts old", "GB200"),
    "megatron_bridge_experts_gb300": _of("mbridge experts new", "GB300"),
    "megatron_bridge_experts_gb300_old": _of("mbridge experts old", "GB300"),
    "megatron_bridge_experts_h100": _of("mbridge experts", "H100"),
    "megatron_bridge_gb200": _of("mbridge", "GB200"),
    "megatron_bridge_gb300": _of("mbridge", "GB300"),
    "megatron_bridge_h100": _of("mbridge", "H100"),
    "megatron_lm_h100": _of("tf=model", "H100"),
    "nemo_h100": _of("nemo2407", "H100"),
    "selene_2021": Rows((("A100", "ptdp_table2"), ("A100", "tf=hw96"), ("A100", "ptdp_table1"))),
    "selene_2021_zero3": _of("ptdp_table2", "A100", only_zero=3),
    "selene_2022": _of("korthikanti_t5", "A100"),
    "titan_h100": _of("titan_like", "H100", "H200"),
    "torchtitan_h100": _of("torchtitan", "H100"),
    "vtrain_a100": _of("vtrain_multi", "A100"),
    "vtrain_a100_node": _of("vtrain_single", "A100"),
}


@cache
def profiles() -> dict[str, Profile]:
    """All profiles by name: those that the package ships, and those of other stacks."""
    of_others = {file.stem: load_profile(str(file)) for file in FOLDER.glob("*.toml")}
    return dict(sorted((builtin_profiles() | of_others).items()))


def profile_for_group(gpu: str, word: str, zero_stage: int = 0, session: str = "") -> Profile | None:
    """The most specific profile for rows of this GPU whose notes begin with this word; None if there is none.

    Instead of a study's word, a profile may name the start of a session, such as "bloom 02-2".
    """
    found = [
        ((only_zero is not None, len(start) + len(first)), name)
        for name, (groups, only_zero) in ROWS.items()
        for start, first in groups
        if only_zero in (None, zero_stage) and gpu.startswith(start)
        if first == word or (" " in first and session.startswith(first))
    ]
    return profiles()[max(found, key=lambda one: one[0])[1]] if found else None


def left_out_figures() -> dict[str, dict[str, float]]:
    """By profile, what `accuracy.judgement` found on rows left out of the fit, besides the error band of its file."""
    return json.loads(LEFT_OUT.read_text(encoding="utf-8"))


def write_profile(profile: Profile, figures: dict[str, float]) -> None:
    """Write a fitted profile, and its figures on rows left out of the fit."""
    text = "# Written by benchmarks/fit_profiles.py. Errors come from groups left out of the fit.\n"
    folder = SHIPPED if profile.name in builtin_profiles() else FOLDER
    (folder / f"{profile.name}.toml").write_text(text + profile_to_toml(profile), encoding="utf-8")
    every = left_out_figures() | {profile.name: figures}
    LEFT_OUT.write_text(json.dumps(dict(sorted(every.items())), indent=2) + "\n", encoding="utf-8")
    builtin_profiles.cache_clear()  # profiles of experts begin from those of dense models
    profiles.cache_clear()
