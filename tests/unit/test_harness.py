"""A checkpoint gives the harness, token for token, what its export gives the harness's class for transformers."""

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.float64 import bound, in_float64
from tests.unit.hugging_face_cases import gpt_config, random_model, save_checkpoint
from tests.unit.tokenizer_cases import save_kind
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.config.errors import ConfigError, RunError
from titan_like.config.schema import Data, JobConfig
from titan_like.data.text.tokenizer import tokenizer_of
from titan_like.evaluate.inference import find_checkpoint, load_parallel_model
from titan_like.evaluate.sampling import Sampling, generate, stop_ids
from titan_like.evaluate.scoring import Scorer
from titan_like.hugging_face.convert import to_hugging_face
from titan_like.parallel.mesh import build_mesh
from titan_like.train.job import process_group
from titan_like.train.rules import resolve_for_inference

SEQ_LEN, NEW_TOKENS = 48, 24


def requests_of(bos: str, eos: str) -> dict[str, list[tuple[Any, ...]]]:
    texts = ["the quick brown", "the cat sat on ", f"{bos}a dog", f"{eos}said", f"fox{eos}\n the{bos}é"]
    texts += ["it said 日本 — 17 +", "the lazy dog jumps over the quick brown fox, " * 4]
    continuations = [" fox jumps", "the mat", f" é{eos}", "x", f"{bos}a cat"]
    return {
        "loglikelihood": [(context, each) for context in ["", *texts] for each in continuations],
        "loglikelihood_rolling": [(text,) for text in texts],
        "generate_until": [
            (text, {"max_gen_toks": NEW_TOKENS, "until": until, "do_sample": False})
            for text in texts
            for until in ([], ["e", "th"], ["on", "o", "n t"], "\n", [bos])
        ]
        + [("the", {"max_new_tokens": 5, "temperature": 1.0, "do_sample": False, "num_beams": 1})],
    }


# What tokenizer_config.json says besides. A template may refuse a system message, or write the beginning of a text.
ABOUT: dict[str, dict[str, Any]] = {
    "spm": {
        "chat_template": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}"
        "{% endif %}{{ m.content + eos_token }}{% endfor %}"
    },
    "l3": {"split_special_tokens": True},
    "chatml": {"bos_token": "<|im_start|>"},
}


@pytest.fixture(scope="module", params=ABOUT)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A checkpoint in float64 and its export, for the harness."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from titan_like.evaluate.harness import CheckpointLM

    folder = tmp_path_factory.mktemp(request.param)
    spec = str(save_kind(folder / "tokenizer", request.param, **ABOUT[request.param]))
    shape = gpt_config(num_layers=2, vocab_size=400)
    settings = {"flavor": "own", "family": "gpt", "flavors": {"own": shape.model_dump(exclude_none=True)}}
    tree: dict[str, Any] = {"model": settings, "data": {"tokenizer": spec}}
    tokenizer, weights = tokenizer_of(Data(tokenizer=spec)), random_model(shape, size=0.3).float().eval()
    with torch.no_grad():
        weights.embedding.weight[sorted(tokenizer.special_ids)] *= 2  # so that the model writes them
    path = save_checkpoint(folder / "run", weights, data=tree["data"])
    to_hugging_face(CheckpointWeights(path), folder / "export", None, 10**9, None)
    ends = generate(weights, tokenizer.encode("the quick brown").tolist(), Sampling(NEW_TOKENS, temperature=0))[7:9]
    for place in (path, folder / "export"):
        (place / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    theirs = HFLM(str(folder / "export"), max_length=SEQ_LEN, batch_size=1, device="cpu", dtype="float64")

    training = {"seq_len": SEQ_LEN, "steps": 1, "dtype": "float64"}
    tree |= {"training": training, "checkpoint": {"folder": str(folder / "run")}}
    config, _, layout = resolve_for_inference(JobConfig.model_validate(tree), 1)
    device = torch.device("cpu")
    with process_group(device):
        mesh = build_mesh(layout, "cpu")
        model = load_parallel_model(config, find_checkpoint(config), mesh, device)
        yield CheckpointLM(Scorer(config, model, mesh, device), tokenizer, stop_ids(tokenizer, path)), theirs


# What a task says of sampling, and what generation_config.json says.
SAMPLED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"do_sample": True, "temperature": 1.0}, {}),
    ({"do_sample": True, "temperature": 0.7, "top_k": 7, "top_p": None}, {"top_k": 3, "top_p": 0.5, "temperature": 3}),
    ({"temperature": 2.0}, {"top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.3, "do_sample": False}),
    ({"temperature": 1.5, "top_k": 0, "min_p": 0.02}, {"top_k": 3, "max_length": 9, "num_beams": 1}),
    ({"do_sample": False}, {"repetition_penalty": 1.8, "top_k": 3, "temperature": 0.2, "do_sample": True}),
]


@pytest.mark.parametrize(("settings", "fields"), SAMPLED)
def test_tokens_are_drawn_from_the_probabilities_of_generate(
    models: tuple[Any, Any], settings: dict[str, Any], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationConfig

    ours, theirs = models
    drawn = list[torch.Tensor]()

    def multinomial(probabilities: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
        drawn.append(probabilities[0, :400])
        return probabilities.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    monkeypatch.setattr(ours, "_generation", fields)
    ends = theirs.model.generation_config.eos_token_id
    monkeypatch.setattr(theirs.model, "generation_config", GenerationConfig(**fields, eos_token_id=ends))
    request = SimpleNamespace(args=("the cat sat on the mat and the", settings | {"max_gen_toks": 9, "until": ["zzz"]}))
    with in_float64():  # generate() rounds logits to float32
        texts = ours.generate_until([request])
        probabilities, drawn[:] = list(drawn), []
        assert theirs.generate_until([request]) == texts
    assert len(drawn) == len(probabilities) == (0 if settings.get("do_sample") is False else len(drawn))
    for found, expected in zip(probabilities, drawn, strict=True):
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found, expected, rtol=bound(), atol=0)


@pytest.mark.parametrize("models", ["chatml"], indirect=True)
def test_each_sample_depends_on_its_request_and_repeat_alone(models: tuple[Any, Any]) -> None:
    ours, settings = models[0], {"do_sample": True, "temperature": 50.0, "max_gen_toks": 20, "until": []}
    requests = [SimpleNamespace(args=(text, settings)) for text in ("the cat", "a dog")]
    first = ours.generate_until([requests[0]] * 4 + [requests[1]] * 3)
    assert len(set(first)) == 7
    assert ours.generate_until([requests[1], requests[0], requests[1]]) == [first[4], first[0], first[5]]
    ours._seed += 1
    assert not {*first} & {*ours.generate_until(requests)}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_a_checkpoint_and_its_export_answer_the_harness_alike(models: tuple[Any, Any], task: str) -> None:
    known = models[1].tokenizer
    asked = requests_of(known.bos_token, known.eos_token)[task]
    requests = [SimpleNamespace(args=arguments, task_name=None) for arguments in asked]
    found, expected = (getattr(model, task)(requests) for model in models)
    if task == "generate_until":
        assert len(set(map(len, found))) > 3
        assert found == expected
        return
    values = [torch.tensor(answers, dtype=torch.float64) for answers in (found, expected)]
    torch.testing.assert_close(*values, rtol=bound(), atol=0)


def test_what_is_not_supported_of_generation_is_one_sentence(models: tuple[Any, Any]) -> None:
    request = SimpleNamespace(args=("the", {"max_gen_toks": 5, "num_beams": 3}))
    with pytest.raises(RunError, match=r"a task sets num_beams = 3 in generation_kwargs, which is not supported"):
        models[0].generate_until([request])


QUESTIONS = [{"text": f"the {noun} sat on", "choices": [" the mat", " a log"]} for noun in ("cat", "dog", "fox", "mat")]
SPLIT = {"test_split": "test", "fewshot_split": "test", "num_fewshot": 2, "doc_to_text": "{{text}}"}
TASKS: dict[str, dict[str, Any]] = {
    "choice": SPLIT
    | {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 0, "description": "Sit."},
    "words": SPLIT
    | {"output_type": "generate_until", "doc_to_target": "{{choices[1]}}", "metric_list": [{"metric": "exact_match"}]}
    | {"generation_kwargs": {"until": ["zz"], "max_gen_toks": 4}, "gen_prefix": "So"},
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the files of the tasks."""
    for key, value in {"HF_HOME": "", "HF_DATASETS_CACHE": "/datasets"}.items():
        monkeypatch.setenv(key, f"{tmp_path}/hf{value}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    data = {"data_files": {"test": str(tmp_path / "questions.jsonl")}}
    for name, task in TASKS.items():
        source = {"task": name, "dataset_path": "json", "dataset_kwargs": data}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(source | task))  # JSON is YAML
    return tmp_path


def run(model: Any, folder: Path, names: Sequence[str] = tuple(TASKS), **options: Any) -> dict[str, Any]:
    from titan_like.evaluate.harness import find_tasks, run_harness

    chosen = find_tasks(names, str(folder), options.get("num_fewshot"), options.get("confirm_run_unsafe_code", False))
    return run_harness(model, *chosen, bootstrap_iters=0, **options)


FLAGS: list[dict[str, Any]] = [
    {"num_fewshot": 3},
    {"system_instruction": "Be brief."},
    {"apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": "Be brief."},
    {"apply_chat_template": True, "fewshot_as_multiturn": False, "fewshot_random_seed": 7},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [FLAGS[0], FLAGS[2], *(pytest.param(flags, marks=pytest.mark.exhaustive) for flags in FLAGS[1::2])]
)
def test_prompts_and_answers_are_those_of_the_harness(models: tuple[Any, Any], tasks: Path, flags: Any) -> None:
    if flags.get("apply_chat_template") and models[1].tokenizer.chat_template is None:
        with pytest.raises(
            ConfigError, match=r"--apply_chat_template = true: data.tokenizer = .* has no chat template"
        ):
            run(models[0], tasks, **flags)
        return
    found, expected = (run(model, tasks, **flags)["samples"] for model in models)
    for task in TASKS:
        for sample, reference in zip(found[task], expected[task], strict=True):
            assert sample["arguments"] == reference["arguments"]
            values = [each["resps"] for each in (sample, reference)]
            assert values[0] == (
                values[1] if task == "words" else [[pytest.approx(v[0], rel=bound())] for v in values[1]]
            )


@pytest.mark.slow
@pytest.mark.parametrize("models", ["chatml"], indirect=True)
@pytest.mark.parametrize(
    ("keys", "options", "error", "problem"),
    [
        ({}, {"num_fewshot": 4}, ConfigError, "--num_fewshot = 4: words has 3 documents that can be examples; use at"),
        ({"num_fewshot": 9}, {}, ConfigError, "--num_fewshot = 9: words has 3 documents that can be examples; use at"),
        ({"num_fewshot": 0}, {"num_fewshot": 9}, None, ""),  # the harness lets the file win
        ({"unsafe_code": True}, {}, ConfigError, '"words": runs code that the model writes.*--confirm_run_unsafe_code'),
        ({"unsafe_code": True}, {"confirm_run_unsafe_code": True}, None, ""),
        (
            {"process_results": "!function mine.fails"},
            {},
            RunError,
            r"words cannot be processed \(ZeroDivisionError: di",
        ),
        (
            {"process_docs": "!function mine.fails"},
            {},
            ConfigError,
            r"the harness cannot build this \(ZeroDivisionError",
        ),
        (
            {"doc_to_text": "!function mine.fails"},
            {},
            ConfigError,
            r"the harness cannot build this \(ZeroDivisionError",
        ),
        (
            {"generation_kwargs": {"temperature": 1, "top_k": "x", "max_gen_toks": 4}},
            {},
            RunError,
            r"words cannot be processed \(ValueE",
        ),
    ],
)
def test_a_task_that_cannot_run_is_one_sentence(
    models: tuple[Any, Any], tasks: Path, keys: Any, options: Any, error: Any, problem: str
) -> None:
    path = tasks / "words.yaml"
    (tasks / "mine.py").write_text("def fails(*_):\n    return 1 / 0\n")
    path.write_text(
        json.dumps(json.loads(path.read_text()) | keys).replace('"!function mine.fails"', "!function mine.fails")
    )
    with nullcontext() if error is None else pytest.raises(error, match=problem):
        run(models[0], tasks, ["words"], **options)


@pytest.mark.parametrize("models", ["chatml"], indirect=True)
def test_what_the_model_itself_raises_is_no_fault_of_a_task(
    models: tuple[Any, Any], tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_like.evaluate.harness.generate", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(models[0], tasks, ["words"])
    models[0].computes = False
