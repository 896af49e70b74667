"""Frequencies of rotary positions by definition, with their scalings.

It imports nothing of the product. Sources are the papers that each case names, and the documented behaviour of
`transformers`.
"""

import math
from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]


def latent_factor(scaling: Fields | None) -> float:
    """DeepSeek's factor on the scores where yarn has `mscale_all_dim`."""
    scaling = scaling and dict(scaling)
    if not scaling or scaling["type"] != "yarn":
        return 1.0
    return (0.1 * scaling["mscale_all_dim"] * math.log(max(scaling["factor"], 1)) + 1) ** 2


def frequency_of(pair: int, size: int, theta: float, scaling: Fields | None, seq_len: int) -> float:
    """Angle per position of one pair of dimensions."""
    frequency = theta ** (-2 * pair / size)
    match scaling and scaling["type"]:
        case None:
            return frequency
        case "linear":  # arXiv 2306.15595
            return frequency / scaling["factor"]
        case "dynamic":  # the base grows with the length, so that the longest wave keeps pace with it
            times = max(1.0, seq_len / scaling["original_max_seq_len"])
            grown = theta * (scaling["factor"] * times - scaling["factor"] + 1) ** (size / (size - 2))
            return grown ** (-2 * pair / size)
        case "longrope":  # arXiv 2402.13753
            is_long = seq_len > scaling["original_max_seq_len"]
            return frequency / scaling["long_factors" if is_long else "short_factors"][pair]
        case "llama3":
            wave = 2 * math.pi / frequency
            longest = scaling["original_max_seq_len"] / scaling["low_freq_factor"]
            shortest = scaling["original_max_seq_len"] / scaling["high_freq_factor"]
            if wave < shortest:
                return frequency
            if wave > longest:
                return frequency / scaling["factor"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            smooth = (scaling["original_max_seq_len"] / wave - low) / (high - low)
            return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        case "yarn":  # arXiv 2309.00071, section 3.2

            def pair_of(turns: float) -> float:
                return size * math.log(scaling["original_max_seq_len"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

            low, high = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
            if scaling["truncate"]:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, size - 1)
            high = high + 0.001 if low == high else high
            ramp = min(max((pair - low) / (high - low), 0), 1)
            return frequency * (1 - ramp) + frequency / scaling["factor"] * ramp
    raise AssertionError(scaling)


def magnitude(scaling: Fields | None, seq_len: int) -> float:
    """Factor on cos and sin."""
    if not scaling or scaling["type"] not in ("yarn", "longrope"):
        return 1.0
    if scaling["short_magnitude"]:
        return scaling["long_magnitude" if seq_len > scaling["original_max_seq_len"] else "short_magnitude"]
    if scaling["attention_factor"]:
        return scaling["attention_factor"]
    log = math.log(max(scaling["factor"], 1))
    if scaling["type"] == "longrope":
        return math.sqrt(1 + log / math.log(scaling["original_max_seq_len"])) if log else 1.0
    if scaling["mscale"] and scaling["mscale_all_dim"]:
        return (0.1 * scaling["mscale"] * log + 1) / (0.1 * scaling["mscale_all_dim"] * log + 1)
    return 0.1 * log + 1
