"""What is wrong is named, and nothing else; a healthy run has no finding.

Curves are power laws over the summed learning rate, as published ones are, with noise; and curves of real runs on a
CPU in tests/unit/diagnosed_runs.json.
"""

import json
import math
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_like.train.diagnosis import MOST_LINES, diagnose

GPT2, BYTES = 50304, 257
GPU = {"run.device_memory_bytes": 80 * 2**30, "run.processes": 8, "training.global_batch_size": 512}
Records = list[dict[str, Any]]


def rates(steps: int, decay: str = "cosine", warmup: float = 0.05, peak: float = 6e-4) -> list[float]:
    lrs = []
    for step in range(1, steps + 1):
        done = step / steps
        factor = {"cosine": 0.1 + 0.45 * (1 + math.cos(math.pi * done)), "constant": 1.0}.get(
            decay, min(1.0, 5 * (1 - done) + 0.01)
        )
        lrs.append(peak * min(1.0, step / max(1.0, warmup * steps)) * factor)
    return lrs


def run(
    steps: int = 1000, vocab: int = GPT2, start: float | None = None, end: float = 3.0, exponent: float = 0.5,
    noise: float = 0.05, lrs: list[float] | None = None, seed: int = 0, **more: Any,
) -> Records:  # fmt: skip
    """A run whose loss is ``end`` + (start - end) · (1 + 200 · share of the summed rate) ** -exponent."""
    generator, lrs = np.random.default_rng(seed), lrs or rates(steps)
    first, spent = start or math.log(vocab), list(accumulate(lrs))
    records = []
    for step, lr in enumerate(lrs, 1):
        loss = end + (first - end) * (1 + 200 * spent[step - 1] / spent[-1]) ** -exponent
        record = {"step": step, "loss": loss + noise * generator.standard_normal(), "lr": lr, "grad_norm": 0.5}
        record |= {"step_time_s": 0.5 * (40 if step == 1 else 1), "data_time_s": 0.002, "skipped": 0, "nan": 0}
        records.append(record | {"peak_memory_bytes": 60 * 2**30, "mfu_model": 0.41} | more)
    return records


def validated(records: Records, loss: Callable[[float], float], interval: int = 100) -> Records:
    """With validations, whose ``loss`` depends on the share of the run that is done."""
    for record in records[interval - 1 :: interval]:
        record["validation_loss"] = loss(record["step"] / len(records))
    return records


def changed(records: Records, change: Callable[[dict[str, Any]], dict[str, Any]], since: int = 1) -> Records:
    return [record | change(record) if record["step"] >= since else record for record in records]


def names(records: Records, settings: dict[str, Any], vocab: int = GPT2) -> list[str]:
    return [finding.name for finding in diagnose(records, {"run.vocab_size": vocab} | settings)]


def balanced(records: Records, entropy: float, largest: float, since: int = 1) -> Records:
    return changed(records, lambda r: {"expert_load_entropy": entropy, "max_expert_share": largest}, since)


def bump(record: dict[str, Any]) -> dict[str, Any]:
    """A loss spike at step 400 that goes back within 40 steps."""
    return {"loss": record["loss"] + 3.0 * max(0.0, 1 - (record["step"] - 400) / 40)}


HEALTHY: dict[str, tuple[Records, dict[str, Any], int]] = {
    "pretraining": (validated(run(2000), lambda done: 3.0 + 4 * (1 + 200 * done) ** -0.5), GPU, GPT2),
    "slow power law": (run(5000, exponent=0.2, end=2.0), GPU, GPT2),
    "warm-up, stable, decay": (run(1500, lrs=rates(1500, "wsd"), end=3.1), GPU, GPT2),
    "constant rate": (run(600, lrs=rates(600, "constant"), end=3.3), {}, GPT2),
    "bytes, noisy batches": (run(400, BYTES, end=1.3, noise=0.25), {}, BYTES),
    "fine-tuning": (validated(run(300, start=2.1, end=1.8, noise=0.1), lambda done: 1.9 - 0.05 * done, 50), {}, GPT2),
    "warm rate again": (run(800, start=2.95, end=2.85, exponent=1.0, lrs=rates(800, "wsd", 0.1)), {}, GPT2),
    "one spike": (changed(run(1000), bump, 400), GPU, GPT2),
    "float16 finds its scale": (changed(run(1000), lambda r: {"skipped": int(r["step"] in (1, 2, 3, 500))}), {}, GPT2),
    "experts": (balanced(balanced(run(1000), 0.6, 4.0), 0.9, 2.0, since=100), GPU, GPT2),
    "thirty steps": (run(30, end=6.0, lrs=rates(30, warmup=1.0)), {}, GPT2),
    "validation that has flattened": (
        validated(run(1000), lambda done: 3.05 + 0.01 * math.sin(40 * done)), {}, GPT2),
    "recomputation in full memory": (run(500), GPU | {"activation_checkpoint.mode": "full"}, GPT2),
    "small model, fast enough": (
        changed(run(500), lambda r: {"peak_memory_bytes": 2**30, "mfu_model": 0.45}), GPU, GPT2),
    "data late, but the GPU is busy": (
        changed(run(500), lambda r: {"data_time_s": 0.2, "host_lead_s": 0.2}), GPU, GPT2),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(name: str) -> None:
    records, settings, vocab = HEALTHY[name]
    assert diagnose(records, {"run.vocab_size": vocab} | settings) == []


def test_healthy_noise_of_many_seeds_has_no_finding() -> None:
    for seed in range(40):
        for noise in (0.02, 0.1, 0.3):
            assert names(run(300 + 20 * seed, noise=noise, seed=seed), {}) == [], (seed, noise)


RECORDED = json.loads(Path(__file__).with_name("diagnosed_runs.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs(name: str) -> None:
    """240 steps of debug models on a CPU: as they should be; with rates of 1e-6 and 1; on 6 KB of text; unbalanced."""
    stored = RECORDED[name]
    columns = {key: values for key, values in stored.items() if isinstance(values, list) and key != "findings"}
    records = [
        {"step": step} | {key: values[step - 1] for key, values in columns.items()}
        | ({"validation_loss": stored["validation_loss"][str(step)]} if str(step) in stored["validation_loss"] else {})
        for step in range(1, len(stored["loss"]) + 1)
    ]  # fmt: skip
    assert names(records, {}, stored["vocab_size"]) == stored["findings"]


def explode(record: dict[str, Any]) -> dict[str, Any]:
    return {"loss": 7.6 + 0.1 * math.sin(record["step"])}


def climb(per_step: float, since: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda record: {"loss": record["loss"] + per_step * (record["step"] - since)}


def spikes(every: int, size: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda record: {"loss": record["loss"] + size * (record["step"] % every == 0)}


def line(steps: int, end: float, decay: str, noise: float = 0.02) -> Records:
    """A loss that falls by as much as the rate is."""
    lrs = rates(steps, decay, peak=1e-6)
    spent, start = list(accumulate(lrs)), math.log(GPT2)
    records = run(steps, lrs=lrs, noise=0.0)
    generator = np.random.default_rng(1)
    losses = (start + (end - start) * part / spent[-1] + noise * generator.standard_normal() for part in spent)
    return [record | {"loss": loss} for record, loss in zip(records, losses, strict=True)]


LOADS = {"expert_load_entropy": 0.4, "max_expert_share": 7.5}
PLANTED: dict[str, list[tuple[Records, dict[str, Any]]]] = {
    "diverged": [
        (changed(run(600), explode, 400), {}),
        (changed(run(600), lambda r: {"loss": None, "nan": 1}, 550), {}),
        (changed(run(600), climb(0.05, 450), 450), {}),
    ],
    "rate_too_high": [
        (changed(run(2000), climb(0.0004, 1000), 1000), {}),
        (changed(run(1000), spikes(97, 1.5), 200), {}),
        (changed(run(1500, noise=0.1), climb(0.0006, 900), 900), {}),
    ],
    "rate_too_low": [
        (line(500, 8.0, "cosine"), {"optimizer.lr": 1e-6}),
        (line(2000, 9.5, "constant"), {"optimizer.lr": 1e-6}),
        (line(300, 10.75, "wsd"), {"optimizer.lr": 1e-9}),
    ],
    "overfitting": [
        (validated(run(1000), lambda done: 3.1 + 2 * (done - 0.4) ** 2), {}),
        (validated(run(400, start=2.0, end=0.9), lambda done: 1.8 + 0.5 * abs(done - 0.25), 20), {}),
        ([r | ({"validation_loss/a": r["validation_loss"], "validation_loss": None} if "validation_loss" in r else {})
          for r in validated(run(800), lambda done: 3.3 + 0.4 * max(0.0, done - 0.5))], {}),
    ],
    "experts_collapsed": [
        (changed(run(500), lambda r: LOADS), {}),
        (changed(run(500), lambda r: LOADS, since=300), {}),
        (balanced(run(200), 0.7, 3.0), {}),
    ],
    "data_bound": [
        (changed(run(300), lambda r: {"data_time_s": 0.3}), {"data.num_workers": 0, "data.dataset": "hf"}),
        (changed(run(60), lambda r: {"data_time_s": 0.07}), {}),
        (changed(run(300), lambda r: {"data_time_s": 0.2, "host_lead_s": 0.005}), GPU),
    ],
    "host_bound": [
        (changed(run(300), lambda r: {"host_lead_s": 0.01} if r["step"] % 10 == 0 else {}), GPU),
        (changed(run(300), lambda r: {"host_lead_s": 0.002}), GPU | {"compile.enable": True}),
        (changed(run(40), lambda r: {"host_lead_s": 0.02} if r["step"] % 5 == 0 else {}), GPU),
    ],
    "communication_bound": [
        (changed(run(300), lambda r: {"exposed_communication": 0.2} if r["step"] % 100 == 0 else {}), {}),
        (changed(run(50), lambda r: {"exposed_communication": 0.5} if r["step"] == 40 else {}), {}),
        (changed(run(300), lambda r: {"exposed_communication": 0.11} if r["step"] % 100 == 0 else {}), {}),
    ],
    "memory_left": [
        (changed(run(300), lambda r: {"peak_memory_bytes": 30 * 2**30}), GPU | {"activation_checkpoint.mode": "full"}),
        (changed(run(300), lambda r: {"peak_memory_bytes": 20 * 2**30, "mfu_model": 0.2}),
         GPU | {"training.micro_batch_size": 4}),
        (changed(run(300), lambda r: {"peak_memory_bytes": 10 * 2**30, "mfu_model": 0.3}),
         GPU | {"training.micro_batch_size": 8, "parallelism.tensor_parallel_degree": 8}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_wrong_is_named_and_nothing_else(name: str) -> None:
    for number, (records, settings) in enumerate(PLANTED[name]):
        assert names(records, settings) == [name], number


def test_a_finding_has_its_number_and_the_key() -> None:
    def text(name: str, number: int = 0) -> str:
        records, settings = PLANTED[name][number]
        return diagnose(records, {"run.vocab_size": GPT2} | settings)[0].text

    assert text("diverged").startswith("the run has diverged since step 400: the last loss is 7.")
    assert "8 spikes in 1,000 steps, the last at step 970" in text("rate_too_high", 1)
    assert "lower optimizer.lr" in text("rate_too_high") and "raise optimizer.lr (1e-06)" in text("rate_too_low")
    assert "50% of the fall from 10.8" in text("rate_too_low") or "49% of the fall" in text("rate_too_low")
    assert "from 3.100 at step 400 to 3.820" in text("overfitting") and "checkpoint.keep_best" in text("overfitting")
    assert "0.40 of its maximum, the largest load 7.5" in text("experts_collapsed")
    assert "60% of the time" in text("data_bound") and "data.num_workers (0), or tokenize" in text("data_bound")
    assert "2.0% of a step after" in text("host_bound") and "set compile.enable" in text("host_bound")
    assert "20% of the time" in text("communication_bound")
    assert "at most 30.0 of 80 GiB" in text("memory_left") and 'mode = "none"' in text("memory_left")
    assert "micro_batch_size = 8 would give 8 larger passes a step instead of 16" in text("memory_left", 1)


def test_never_more_than_five_lines() -> None:
    settings = GPU | {"activation_checkpoint.mode": "full"}
    records = changed(run(300), lambda r: LOADS | {"exposed_communication": 0.4, "data_time_s": 0.3})
    records = validated(changed(records, lambda r: {"peak_memory_bytes": 2**30}), lambda done: 3.1 + done, 20)
    records = changed(records, spikes(40, 5.0), 100)
    assert names(records, settings) == [
        *("rate_too_high", "overfitting", "experts_collapsed", "data_bound", "communication_bound")
    ]
    assert MOST_LINES == 5
    assert diagnose([], {}) == []
