import io
import json
from contextlib import nullcontext

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.hugging_face_cases import llama_config, random_model, save_checkpoint
from tests.unit.template_cases import save_published
from tests.unit.tokenizer_cases import save_kind
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.commands import generate as command
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Model
from titan_like.evaluate.sampling import Sampling, filter_logits, generate
from titan_like.hugging_face.convert import to_hugging_face
from titan_like.models.batch import Batch
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.registry import build_model, model_config

VOCABULARY = 29


def kept_by_definition(row, k, p):
    """Of the k most probable tokens, of equal ones the lowest, the smallest set whose probabilities reach p."""
    left = sorted(range(len(row)), key=lambda token: -row[token])[: k or len(row)]
    probabilities = torch.tensor([row[token] for token in left], dtype=torch.float64).softmax(-1).tolist()
    sizes = (size for size in range(1, len(left)) if p < 1 and sum(probabilities[:size]) >= p)
    return {token for token in left[: next(sizes, len(left))] if row[token] > float("-inf")}


@pytest.mark.parametrize("k", [0, 1, 2, 7, VOCABULARY, 2 * VOCABULARY])
@pytest.mark.parametrize("p", [1e-300, 1e-6, 0.3, 0.5, 0.8, 0.999, 1.0])
def test_top_k_and_top_p_keep_what_their_definitions_keep(k, p):
    logits = 2 * torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits[:10] = logits[:10].round()  # many are equal
    logits[0] = 0
    logits[20:30, -4:] = float("-inf")  # padding, which never comes back
    filtered = filter_logits(logits, k, p)
    kept = [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in filtered]
    assert kept == [kept_by_definition(row, k, p) for row in logits.tolist()]
    assert torch.equal(filtered[filtered.isfinite()], logits[filtered.isfinite()])
    assert torch.equal(filter_logits(logits, k, p, min_p=1e-30), filtered)  # which leaves all of these


@pytest.fixture(scope="module", params=["gpt", "llama"])
def model(request):
    overrides = {"num_layers": 2, "hidden_size": 32, "max_seq_len": 16}
    model = build_model(model_config(Model(family=request.param, overrides=overrides)), request.param)
    model.init_weights(seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)  # distributions that are far from uniform
    return model


PROMPT = [1, 2, 3, 4]


@pytest.mark.parametrize("prefix_lm", [False, True])
@pytest.mark.parametrize(("length", "penalty"), [(4, 1.0), (40, 1.0), (40, 1.7)])
def test_temperature_0_takes_the_most_probable_token_after_the_last_max_seq_len(model, length, penalty, prefix_lm):
    tokens = prompt = [(7 * i + 1) % 250 for i in range(length)]
    for _ in range(20):
        first = max(0, len(tokens) - model.config.max_seq_len)  # of the window
        ends = [max(at + 1, length - first) if prefix_lm else at + 1 for at in range(len(tokens) - first)]
        mask = KeyRanges(torch.zeros(1, len(ends), dtype=torch.int64), torch.tensor([ends]))
        with torch.no_grad():
            logits = model(Batch(torch.tensor([tokens[first:]]), document_mask=mask))[0, -1]
        for token in set(tokens):  # also of those before the window
            logits[token] *= penalty if logits[token] < 0 else 1 / penalty
        tokens = [*tokens, int(logits.argmax())]
    greedy = [{"temperature": 0}, {"temperature": 0, "seed": 5, "top_k": 3, "top_p": 0.1}]
    greedy += [{"top_k": 1, "seed": 9}, {"temperature": 1e-4, "seed": 9}]
    for sampling in (Sampling(20, repetition_penalty=penalty, **settings) for settings in greedy):
        assert generate(model, prompt, sampling, prefix_lm=prefix_lm) == tokens[length:]


def test_seed_decides_the_text(model):
    texts = [generate(model, PROMPT, Sampling(12, seed=seed)) for seed in (0, 0, 1, 2)]
    torch.manual_seed(123)  # other draws do not matter
    assert generate(model, PROMPT, Sampling(12, seed=0)) == texts[0] == texts[1]
    assert texts[0] != texts[2] != texts[3] != texts[0]
    assert {len(text) for text in texts} == {12}


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (9.0, 5, 0.7)])
def test_first_token_follows_the_distribution(model, temperature, top_k, top_p):
    samplings = [Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed) for seed in range(200)]
    draws = [generate(model, PROMPT, sampling)[0] for sampling in samplings]
    observed = torch.bincount(torch.tensor(draws), minlength=model.config.padded_vocab_size) / len(draws)
    with torch.no_grad():
        scaled = model(Batch(torch.tensor([PROMPT])))[0, -1].double() / temperature
    kept = kept_by_definition(scaled.tolist(), top_k, top_p)
    scaled[[t for t in range(len(scaled)) if t not in kept]] = float("-inf")
    expected = scaled.softmax(-1)
    assert set(draws) <= set((expected > 0).nonzero().flatten().tolist())
    # Each frequency is within 5 standard deviations of its probability.
    deviation = (expected * (1 - expected) / len(draws)).sqrt()
    assert ((observed - expected).abs() <= 5 * deviation + 2 / len(draws)).all()


def test_only_real_tokens_are_drawn(model):
    assert model.config.padded_vocab_size == 384
    assert max(generate(model, PROMPT, Sampling(200, temperature=50.0))) in range(240, 257)


def test_stops_at_the_end_of_the_document_or_when_the_text_is_complete(model):
    text, seen = generate(model, PROMPT, Sampling(12)), []
    assert generate(model, PROMPT, Sampling(12, stop_ids={text[5], 999})) == text[: text.index(text[5])]
    unused = next(token for token in range(257) if token not in text)
    assert generate(model, PROMPT, Sampling(12, stop_ids={unused})) == text

    def is_complete(new):
        seen.append(new)
        return len(new) == 4

    assert generate(model, PROMPT, Sampling(12), is_complete=is_complete) == text[:4]
    assert seen == [text[:1], text[:2], text[:3], text[:4]]


def test_dropout_is_off_while_sampling():
    overrides = {"num_layers": 1, "hidden_size": 32, "dropout": 0.5}
    model = build_model(model_config(Model(overrides=overrides)), "gpt")
    model.init_weights(seed=3)
    model.train()
    assert len({tuple(generate(model, PROMPT, Sampling(6, temperature=0))) for _ in range(4)}) == 1


@pytest.mark.parametrize("kind", ["spm", "l3", "chatml"])
def test_a_text_is_continued_as_transformers_would(tmp_path, monkeypatch, capsys, kind):
    folder = save_kind(
        tmp_path / "tokenizer", kind, **({"bos_token": "<|im_start|>"} if kind == "chatml" else {})
    ).parent
    theirs = AutoTokenizer.from_pretrained(folder)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')  # of the checkpoint
    asked, texts = [], []

    def sample(config, path, prompt, sampling):
        asked.append((prompt, set(sampling.stop_ids)))
        return theirs(f"{texts[-1]} the mat 日").input_ids[len(theirs(texts[-1]).input_ids) :]

    monkeypatch.setattr("titan_like.evaluate.inference.find_checkpoint", lambda config: tmp_path)
    monkeypatch.setattr(command, "sample", sample)

    def prompt_of(prompt, *settings):
        texts.append(prompt)
        basic = [f"--data.tokenizer={folder}/tokenizer.json", "--training.steps=1", f"--json={tmp_path}/answer.json"]
        command.main([*basic, "--prompt", prompt, *settings])
        assert capsys.readouterr().out == f"{prompt} the mat 日\n"
        assert json.loads((tmp_path / "answer.json").read_text())["continuation"] == " the mat 日"
        return asked[-1][0]

    begins = [] if kind == "chatml" else [theirs.bos_token_id]  # whose tokenizer puts nothing before a text
    plain = theirs("the cat sat on", add_special_tokens=False).input_ids
    assert prompt_of("the cat sat on") == [*begins, *plain]
    assert prompt_of("the cat sat on", "--data.bos=never") == plain
    assert prompt_of("the cat sat on", "--data.bos=always") == [theirs.bos_token_id, *plain]
    written = f"{theirs.bos_token}the cat{theirs.eos_token} sat on"  # special tokens in a prompt are special tokens
    assert prompt_of(written) == theirs(written, add_special_tokens=False).input_ids
    assert asked[-1][1] == {theirs.eos_token_id, 7, 8}

    answers = ["--data.dataset=conversations", f"--data.paths={tmp_path}/a.jsonl"]
    answers += ["--data.reset_attention_mask=true", "--data.reset_position_ids=true"]
    assert prompt_of("the cat sat on", *answers) == [*begins, *plain]
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")  # which writes all itself
    assert prompt_of("the cat sat on", *answers) == plain


@pytest.mark.parametrize(("kind", "first"), [("spm", "<s>"), ("chatml", "<|im_end|>")])
def test_an_empty_prompt_is_where_a_document_begins(tmp_path, monkeypatch, kind, first):
    path, prompts = save_kind(tmp_path / "tokenizer", kind), []
    monkeypatch.setattr("titan_like.evaluate.inference.find_checkpoint", lambda config: tmp_path)
    monkeypatch.setattr(command, "sample", lambda config, path, prompt, *more: prompts.append(prompt) or [])
    command.main([f"--data.tokenizer={path}", "--training.steps=1", "--prompt", ""])
    assert prompts == [[Tokenizer.from_file(str(path)).token_to_id(first)]]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_conversation_is_that_of_transformers(tmp_path, monkeypatch, capsys, sampled):
    """Its template, its ends of turns and its defaults, with a lone message too; the input's end ends it."""
    folder = save_kind(tmp_path / "tokenizer", "chatml").parent
    model = random_model(llama_config(vocab_size=512, max_seq_len=256), size=0.3).float()
    theirs = AutoTokenizer.from_pretrained(folder)
    path = save_checkpoint(tmp_path / "run", model, data={"tokenizer": str(folder)})
    messages = [{"role": "system", "content": "Sit."}, {"role": "user", "content": "the cat"}]
    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True).input_ids
    ends = generate(model, prompt, Sampling(12, temperature=0))[7:9]  # so that the first answer ends with one of them
    fields = {"eos_token_id": ends} | ({"do_sample": True, "top_k": 1} if sampled else {})
    (path / "generation_config.json").write_text(json.dumps(fields))
    to_hugging_face(CheckpointWeights(path), tmp_path / "hf", None, 10**9, None)
    reference, messages = AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), messages[:1]
    stopped = set()
    for text in ("the cat", "17 + 25 é"):
        messages.append({"role": "user", "content": text})
        inputs = theirs.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        new = reference.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs.input_ids.shape[1] :]
        stopped |= {*new.tolist()} & {*ends}
        messages.append({"role": "assistant", "content": theirs.decode(new, skip_special_tokens=True)})
    assert stopped
    for end in stopped:  # what is not special is a text's last token in transformers, and no part of an answer here
        for message in messages[2::2]:
            message["content"] = message["content"].removesuffix(theirs.decode([end]))
    command_line = [
        "--checkpoint",
        str(tmp_path / "hf"),
        "--chat",
        "--system=Sit.",
        "--max_new_tokens=40",
        f"--json={tmp_path}/a.json",
    ]
    command_line += [] if sampled else ["--temperature=0"]
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\n17 + 25 é\n"))
    assert command.main(command_line) == 0
    assert json.loads((tmp_path / "a.json").read_text())["messages"] == messages
    answers = [f"{message['content']}\n" for message in messages[2::2]]
    assert capsys.readouterr().out == "".join(answers)
    assert command.main([*command_line, "--prompt", "the cat"]) == 0
    assert capsys.readouterr().out == answers[0]


@pytest.mark.parametrize(
    ("name", "kwargs", "answer"),
    [
        ("gpt_oss", {"reasoning_effort": "high"}, "<|channel|>analysis<|message|>a<|end|><|start|>assistant{}the mat"),
        ("gpt_oss", {}, "{}the mat"),
        ("qwen3", {"enable_thinking": False}, "the mat"),
        ("glm4", {}, "the mat"),
        ("mistral", {}, "the mat"),
    ],
)
def test_answers_come_back_in_the_form_of_the_template(tmp_path, monkeypatch, name, kwargs, answer):
    """With the variables of the run; what begins the text of an answer is the template's."""
    file, prompts = save_published(tmp_path, name), []
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    written = theirs(answer.format("<|channel|>final<|message|>"), add_special_tokens=False).input_ids

    def continue_prompt(prompt, sampling, is_complete):
        prompts.append(prompt)
        return written

    monkeypatch.setattr(command, "opened", lambda *_: nullcontext(continue_prompt))
    monkeypatch.setattr("titan_like.evaluate.inference.find_checkpoint", lambda config: tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\nthe dog\n"))
    settings = [f"--data.tokenizer={file}", "--training.steps=1"]
    settings += [f"--data.chat_template_kwargs.{variable}={json.dumps(value)}" for variable, value in kwargs.items()]
    assert command.main([*settings, "--chat"]) == 0
    texts = ("the cat", "the mat", "the dog")
    messages = [{"role": role, "content": t} for role, t in zip(("user", "assistant", "user"), texts, strict=True)]
    expected = [theirs.apply_chat_template(messages[:n], add_generation_prompt=True, **kwargs) for n in (1, 3)]
    assert prompts == [each.input_ids for each in expected]


def test_a_conversation_needs_a_template(tmp_path, monkeypatch):
    path = save_kind(tmp_path / "tokenizer", "l3")
    monkeypatch.setattr("titan_like.evaluate.inference.find_checkpoint", lambda config: tmp_path)
    with pytest.raises(ConfigError, match=r"--chat = true: data.tokenizer = .* has no chat template; name an instruct"):
        command.main([f"--data.tokenizer={path}", "--training.steps=1", "--chat"])
    with pytest.raises(ConfigError, match='--system = "a": is for --chat; add that'):
        command.main([f"--data.tokenizer={path}", "--training.steps=1", "--system=a"])
