"""What of a run its small one keeps."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from titan_like.commands.verify import format_verdict, main
from titan_like.config import load_config
from titan_like.data.loading.batch_size import total_steps
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout
from titan_like.parallel.split import layers_per_stage
from titan_like.verify import processes
from titan_like.verify.compare import DROPOUT
from titan_like.verify.shrink import Options, Small, resolve, shrink, two_kinds
from titan_like.verify.verify import SAME, Verdict, Verifier

RAMPUP = ["--training.batch_size_rampup", "[8,8,64]", "--training.global_batch_size", "32"]


def small_run(*settings: str, on_gpus: bool = False) -> Small:
    config = load_config(["--training.seq_len=64", *settings])
    return shrink(config, resolve(config, None), Options(3, on_gpus=on_gpus))


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_heads_are_wide_enough_for_the_kernels_of_gpus(family: str, tensor: int) -> None:
    layout = [f"--parallelism.tensor_parallel_degree={tensor}", "--model.overrides.num_kv_heads=4"]
    small, on_gpus = (
        model_config(small_run(f"--model.family={family}", "--training.steps=9", *layout, on_gpus=on_gpus).config.model)
        for on_gpus in (False, True)
    )
    assert small.head_dim in (4, 8) and on_gpus.head_dim == 16
    assert on_gpus.num_attention_heads == small.num_attention_heads and on_gpus.num_kv_heads == small.num_kv_heads


@pytest.mark.parametrize(("tensor", "kv_heads", "small_kv_heads"), [(4, 2, 2), (8, 4, 2), (8, 2, 1), (8, 1, 1)])
def test_ranks_still_share_key_value_heads(tensor: int, kv_heads: int, small_kv_heads: int) -> None:
    degree = f"--parallelism.tensor_parallel_degree={tensor}"
    heads = ["--model.overrides.num_attention_heads=16", f"--model.overrides.num_kv_heads={kv_heads}"]
    for settings in ([], ["--float8.enable=true"]):
        small = small_run("--model.family=llama", "--training.steps=9", degree, *heads, *settings).config
        model = model_config(small.model)
        assert small.parallelism.tensor_parallel_degree == 4
        assert (model.num_attention_heads, model.num_kv_heads) == (8, small_kv_heads)


@pytest.mark.parametrize("rampup", [[], RAMPUP], ids=["constant", "ramp-up"])
@pytest.mark.parametrize("length", ["steps=800", "samples=6400", "tokens=400000", "epochs=2"])
def test_a_length_stays_one_in_its_unit(length: str, rampup: list[str]) -> None:
    small = small_run(f"--training.{length}", *rampup)
    training, unit = small.config.training, length.partition("=")[0].replace("epochs", "samples")
    given = {key for key in ("steps", "samples", "tokens", "epochs") if getattr(training, key) is not None}
    assert given == {unit} and total_steps(training) == small.num_steps + 2


@pytest.mark.parametrize(
    ("settings", "virtual", "microbatches", "limits"),
    [
        (
            "pipeline_schedule=interleaved_1f1b virtual_stages_per_rank=4",
            3,
            4,
            "3 of 4 virtual stages, 4 of 8 microbat",
        ),
        ("pipeline_schedule=interleaved_1f1b virtual_stages_per_rank=2", 2, 4, "5 of 20 layers, 4 of 8 microbatches"),
        ("pipeline_parallel_degree=10", 1, 3, "2 of 10 processes, 3 of 20 layers, 3 of 8 microbatches"),
        ("data_parallel_shard_degree=8", 1, 2, "8 of 16 processes, 3 of 20 layers, 3 of 8 samples in a microbatch"),
    ],
)
def test_sizes_stay_above_two_where_the_run_s_are(settings: str, virtual: int, microbatches: int, limits: str) -> None:
    layout = ["pipeline_parallel_degree=2", "data_parallel_shard_degree=1", *settings.split()]
    batch = ["micro_batch_size=8", "global_batch_size=64", "steps=9"]
    small = small_run(
        "--model.overrides.num_layers=20",
        *[f"--parallelism.{setting}" for setting in layout],
        *[f"--training.{setting}" for setting in batch],
    )
    training, degrees = small.config.training, Layout.of(small.config.parallelism)
    assert small.config.parallelism.virtual_stages_per_rank == virtual and training.micro_batch_size == 3
    assert training.global_batch_size == 3 * microbatches * degrees.data_parallel
    assert limits in ", ".join(small.limits)
    assert small.longer["training.seq_len"] == 64 and "positions" not in small.limits[-1]


@pytest.mark.parametrize(
    ("counts", "encoder", "two", "three"),
    [
        ([4, 4], 4, [2, 2], [2, 1, 2]),  # the encoder ends with a stage
        ([1, 3], 2, [1, 3], [1, 3, 1]),  # it is split
        ([2, 2, 2, 2], 4, [1, 3], [1, 1, 2]),  # both
        ([6, 2], 4, [3, 2], [3, 1, 2]),  # neither
    ],
)
def test_stages_of_an_encoder_and_a_decoder(counts: list[int], encoder: int, two: list[int], three: list[int]) -> None:
    assert two_kinds(counts, encoder, 2) == two
    assert two_kinds(counts, encoder, 3) == three


def test_given_stages_of_an_encoder_and_a_decoder_stay_of_both_kinds() -> None:
    settings = ["--model.family=t5", "--model.flavor=debug", "--training.steps=9", "--data.tokenizer=byte"]
    config = load_config([*settings, "--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_layers=[3,1]"])
    small = shrink(config, resolve(config, None), Options(4))
    assert small.config.parallelism.pipeline_layers == [3, 2]  # the first has the encoder's 2 and one of the decoder's


@pytest.mark.parametrize("stages", [[], ["--parallelism.pipeline_layers=[6,6]"]])
def test_every_kind_of_layer_stays_with_a_window_below_the_length(stages: list[str]) -> None:
    pattern = ["a", "a", "b", "a", "c", "d"]
    windows = "{a={window=512},b={},c={window=64},d={rope_theta=0.0}}"
    given = ["--training.steps=1", "--model.family=llama", "--model.overrides.num_layers=12", "--training.seq_len=2048"]
    given += [f"--model.overrides.layer_pattern={json.dumps(pattern)}", f"--model.overrides.kinds={windows}"]
    given += ["--model.overrides.max_seq_len=2048", *stages]
    config = load_config([*given, "--parallelism.pipeline_parallel_degree=2"])
    small = shrink(config, resolve(config, None), Options(2))
    for run in (small, small.large):
        model, seq_len = model_config(run.config.model), run.config.training.seq_len
        assert isinstance(model, DecoderConfig)
        sizes = {name: model.kind(name).window for name in "abcd"}
        assert set(model.layer_kinds) == {0, 1, 2, 3}
        assert sizes["b"] == sizes["d"] == 0 < sizes["c"] < sizes["a"] < seq_len


@pytest.mark.parametrize("flavor", ["gemma2_9b", "gemma3_4b", "gpt_oss_20b", "smollm3_3b", "debug_kinds"])
@pytest.mark.parametrize("layers", [[], ["--parallelism.pipeline_layers"]])
@pytest.mark.parametrize(("pipeline", "virtual"), [(2, 1), (3, 1), (2, 2), (4, 2), (2, 3)])
def test_stages_do_not_begin_like_the_model_where_kinds_of_layers_recur(
    flavor: str, layers: list[str], pipeline: int, virtual: int
) -> None:
    """Else a pattern that is counted from a stage's own first layer would be the model's."""
    settings = ["--model.family=decoder", f"--model.flavor={flavor}", "--training.steps=9"]
    number, stages = model_config(load_config(settings).model).num_layers, pipeline * virtual
    if stages > number:
        pytest.skip(f"{stages} stages for {number} layers")
    rest = [number // stages] * (stages - 1)
    settings += [f"{key}={[number - sum(rest), *rest]}" for key in layers]
    settings += ["--training.global_batch_size=32", f"--parallelism.pipeline_parallel_degree={pipeline}"]
    if virtual > 1:
        settings += ["--parallelism.pipeline_schedule=interleaved_1f1b"]
        settings += [f"--parallelism.virtual_stages_per_rank={virtual}"]
    small = small_run(*settings, "--parallelism.data_parallel_shard_degree=1").config
    model, stages = model_config(small.model), len(Layout.of(small.parallelism).stage_ranks)
    kinds, counts = model.layer_kinds, layers_per_stage(small, model, stages)
    starts = [sum(counts[:stage]) for stage in range(1, stages)]
    in_step = [kinds[start : start + n] == kinds[:n] for start, n in zip(starts, counts[1:], strict=True)]
    assert not any(in_step), (kinds, counts)
    assert set(kinds) == set(range(len(set(kinds)))) and len(set(kinds)) > 1


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ("--model.family=gpt", {"model.overrides": 0.0}),
        ("--model.family=llama --lora.rank=2 --lora.dropout=0.25", {"lora.dropout": 0.25}),
        # Adapters can drop under context parallelism, and the model cannot.
        (
            "--model.family=gpt --lora.rank=2 --lora.dropout=0.25 --parallelism.context_parallel_degree=2",
            {"lora.dropout": 0.25},
        ),
        ("--model.family=llama --lora.rank=2", {}),
    ],
)
def test_whatever_can_drop_is_in_a_run_with_dropout(settings: str, rates: dict[str, float]) -> None:
    small = small_run("--training.steps=9", *settings.split())
    assert small.dropout == rates and (DROPOUT in Verifier(small).kinds) == bool(rates)
    assert small.config.lora.dropout == 0 and not getattr(model_config(small.config.model), "dropout", 0)
    changed = small.dropping(small.config, 0.4)
    assert changed.lora.dropout == 0.4 * ("lora.dropout" in rates)
    assert getattr(model_config(changed.model), "dropout", 0) == 0.4 * ("model.overrides" in rates)


def test_the_command_leaves_the_handler_of_signals_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "start_fork_server", lambda on_gpus: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        main(["--training.steps=9"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_settings_that_nothing_verifies_are_listed_in_one_line(tmp_path: Path) -> None:
    books = tmp_path / "books.txt"
    books.write_text("a text")
    sets = f'[{{name = "books", paths = ["{books}"]}}]'
    given = [f"--evaluation.sets={sets}", "--evaluation.interval=5", "--health.loss_spike_factor=3"]
    small = small_run("--training.steps=9", *given)
    assert small.left_out == ["evaluation.sets", "health.loss_spike_factor"] and small.own_data is None
    verdict = Verdict(SAME, Layout(), [], left_out=small.left_out)
    line = "not verified: evaluation.sets, health.loss_spike_factor (docs/verify.md has all limits)"
    assert format_verdict(verdict, [], 1.0).splitlines()[0] == line
    plain = small_run("--training.steps=9").left_out
    assert plain == [] and "not verified" not in format_verdict(Verdict(SAME, Layout(), [], left_out=plain), [], 1.0)


def test_small_forms_name_settings_and_are_valid() -> None:
    config = load_config(["--training.steps=9", "--optimizer.matrix_lr=0.02", "--checkpoint.async=true"])
    small = config.small()
    for name, section in small:
        assert set(section.SMALL) <= set(type(section).model_fields)
        type(section).model_validate(section.model_dump())
        assert section.small() == section, name
    assert small.optimizer.matrix_lr == pytest.approx(0.02 / 3e-4 * 1e-3) and small.checkpoint.async_
    assert small.metrics.log_interval == 1 and not small.checkpoint.enable
