"""A checkpoint gives the harness, token for token, what its export gives the harness's class for transformers."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.float64 import bound
from tests.unit.hugging_face_cases import gpt_config, random_model, save_checkpoint
from tests.unit.tokenizer_cases import save_kind
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.config.errors import RunError
from titan_like.config.schema import Data, JobConfig
from titan_like.data.tokenizer import tokenizer_of
from titan_like.evaluate.inference import find_checkpoint, load_parallel_model
from titan_like.evaluate.sampling import generate, stop_ids
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


@pytest.fixture(scope="module", params=["spm", "l3", "chatml"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A checkpoint in float64 and its export, for the harness."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from titan_like.evaluate.harness import CheckpointLM

    folder, bos = tmp_path_factory.mktemp(request.param), {"bos_token": "<|im_start|>"}
    spec = str(save_kind(folder / "tokenizer", request.param, **(bos if request.param == "chatml" else {})))
    shape = gpt_config(num_layers=2, vocab_size=400)
    settings = {"flavor": "own", "family": "gpt", "flavors": {"own": shape.model_dump(exclude_none=True)}}
    tree: dict[str, Any] = {"model": settings, "data": {"tokenizer": spec}}
    tokenizer, weights = tokenizer_of(Data(tokenizer=spec)), random_model(shape, size=0.3).float().eval()
    with torch.no_grad():
        weights.embedding.weight[sorted(tokenizer.special_ids)] *= 2  # so that the model writes them
    path = save_checkpoint(folder / "run", weights, data=tree["data"])
    to_hugging_face(CheckpointWeights(path), folder / "export", None, 10**9, None)
    ends = generate(weights, tokenizer.encode("the quick brown").tolist(), NEW_TOKENS, temperature=0)[7:9]
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
        yield CheckpointLM(config, model, mesh, device, tokenizer, stop_ids(tokenizer, path)), theirs


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
