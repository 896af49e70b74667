import itertools
import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.unit.tokenizer_cases import save_kind
from titan_like.commands import generate as command
from titan_like.config.schema import Model
from titan_like.evaluate.sampling import filter_logits, generate
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.registry import build_model, model_config

VOCABULARY = 29


def kept_by_top_k(row, k):
    return set(sorted(range(len(row)), key=lambda token: -row[token])[:k])


def kept_by_top_p(row, p):
    """The smallest set of tokens whose probabilities reach p, by trying the sizes."""
    probabilities = torch.tensor(row, dtype=torch.float64).softmax(-1).tolist()
    ranked = sorted(range(len(row)), key=lambda token: -probabilities[token])
    return next(
        set(ranked[:size])
        for size in range(1, len(row) + 1)
        if sum(probabilities[token] for token in ranked[:size]) >= p or size == len(row)
    )


def kept(logits):
    return [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in logits]


@pytest.fixture
def logits():
    return 2 * torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("k", [1, 2, 7, VOCABULARY, 2 * VOCABULARY])
def test_top_k_keeps_the_k_most_probable(logits, k):
    filtered = filter_logits(logits, k, 1.0)
    assert kept(filtered) == [kept_by_top_k(row, k) for row in logits.tolist()]
    assert torch.equal(filtered[filtered.isfinite()], logits[filtered.isfinite()])


def test_of_equal_logits_those_of_the_lowest_tokens_are_kept(logits):
    rows = torch.cat((logits.round(), torch.zeros(1, VOCABULARY)))  # many are equal
    for k in (1, 2, 7):  # sorted(), which decides here, keeps the order of equals
        assert kept(filter_logits(rows, k, 1.0)) == [kept_by_top_k(row, k) for row in rows.tolist()]
    for p in (1e-6, 0.3, 0.75):
        assert kept(filter_logits(rows, 0, p)) == [kept_by_top_p(row, p) for row in rows.tolist()]
    assert kept(filter_logits(rows, 5, 0.5))[-1] == {0, 1, 2}


@pytest.mark.parametrize("p", [1e-300, 1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_fewest_that_reach_p(logits, p):
    filtered = filter_logits(logits, 0, p)
    expected = [kept_by_top_p(row, p) for row in logits.tolist()]
    assert kept(filtered) == expected
    assert max(len(tokens) for tokens in expected) > (1 if p >= 0.5 else 0)
    assert torch.equal(filtered[filtered.isfinite()], logits[filtered.isfinite()])


@pytest.mark.parametrize(("k", "p"), list(itertools.product((2, 5, 20), (0.3, 0.8))))
def test_top_p_counts_among_what_top_k_left(logits, k, p):
    filtered = filter_logits(logits, k, p)
    for row, tokens in zip(logits.tolist(), kept(filtered), strict=True):
        left = sorted(kept_by_top_k(row, k))
        assert tokens == {left[i] for i in kept_by_top_p([row[token] for token in left], p)}


def test_no_filter_changes_nothing(logits):
    assert torch.equal(filter_logits(logits, 0, 1.0), logits)


def test_padding_never_comes_back(logits):
    logits[:, -4:] = float("-inf")
    for k, p in ((0, 0.999), (VOCABULARY, 1.0), (VOCABULARY, 0.999)):
        assert not any(tokens & set(range(VOCABULARY - 4, VOCABULARY)) for tokens in kept(filter_logits(logits, k, p)))


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


def next_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens[-model.config.max_seq_len :]]))[0, -1]


def test_temperature_0_takes_the_most_probable_token(model):
    tokens = list(PROMPT)
    for _ in range(8):
        tokens.append(int(next_logits(model, tokens).argmax()))
    assert generate(model, PROMPT, 8, temperature=0) == tokens[4:]
    assert generate(model, PROMPT, 8, temperature=0, seed=5, top_k=3, top_p=0.1) == tokens[4:]
    assert generate(model, PROMPT, 8, top_k=1, seed=9) == tokens[4:]
    assert generate(model, PROMPT, 8, temperature=1e-4, seed=9) == tokens[4:]


def test_prompt_of_a_prefix_language_model_is_its_prefix(model):
    tokens = list(PROMPT)
    for _ in range(8):
        first = max(0, len(tokens) - model.config.max_seq_len)  # of the window
        ends = [max(position + 1, len(PROMPT) - first) for position in range(len(tokens) - first)]
        mask = KeyRanges(torch.zeros(1, len(ends), dtype=torch.int64), torch.tensor([ends]))
        with torch.no_grad():
            logits = model(torch.tensor([tokens[first:]]), document_mask=mask)
        tokens.append(int(logits[0, -1].argmax()))
    assert generate(model, PROMPT, 8, temperature=0, prefix_lm=True) == tokens[len(PROMPT) :]


def test_seed_decides_the_text(model):
    texts = [generate(model, PROMPT, 12, seed=seed) for seed in (0, 0, 1, 2)]
    torch.manual_seed(123)  # other draws do not matter
    assert generate(model, PROMPT, 12, seed=0) == texts[0] == texts[1]
    assert texts[0] != texts[2] != texts[3] != texts[0]
    assert {len(text) for text in texts} == {12}


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 5)])
def test_first_token_follows_the_distribution(model, temperature, top_k):
    draws = [generate(model, PROMPT, 1, temperature=temperature, top_k=top_k, seed=seed)[0] for seed in range(200)]
    observed = torch.bincount(torch.tensor(draws), minlength=model.config.padded_vocab_size) / len(draws)
    scaled = next_logits(model, PROMPT).double() / temperature
    if top_k:
        scaled[[t for t in range(len(scaled)) if t not in kept_by_top_k(scaled.tolist(), top_k)]] = float("-inf")
    expected = scaled.softmax(-1)
    assert set(draws) <= set((expected > 0).nonzero().flatten().tolist())
    # Each frequency is within 5 standard deviations of its probability.
    deviation = (expected * (1 - expected) / len(draws)).sqrt()
    assert ((observed - expected).abs() <= 5 * deviation + 2 / len(draws)).all()


def test_only_real_tokens_are_drawn(model):
    assert model.config.padded_vocab_size == 384
    assert max(generate(model, PROMPT, 200, temperature=50.0)) in range(240, 257)


def test_stops_at_the_end_of_the_document(model):
    text = generate(model, PROMPT, 12, seed=0)
    end = text[5]
    assert generate(model, PROMPT, 12, seed=0, stop_ids={end, 999}) == text[: text.index(end)]
    unused = next(token for token in range(257) if token not in text)
    assert generate(model, PROMPT, 12, seed=0, stop_ids={unused}) == text


def test_stops_when_the_text_is_complete(model):
    text = generate(model, PROMPT, 12, seed=0)
    seen = []
    assert generate(model, PROMPT, 12, seed=0, is_complete=lambda new: seen.append(new) or len(new) == 4) == text[:4]
    assert seen == [text[:1], text[:2], text[:3], text[:4]]


def test_context_is_the_last_max_seq_len_tokens(model):
    assert model.config.max_seq_len == 16
    long_prompt = [(7 * i) % 250 for i in range(40)]
    continuation = generate(model, long_prompt, 20, temperature=0)
    assert len(continuation) == 20
    assert continuation == generate(model, long_prompt[-16:], 20, temperature=0)
    tokens = list(long_prompt)
    for _ in range(20):
        tokens.append(int(next_logits(model, tokens).argmax()))
    assert continuation == tokens[40:]


def test_dropout_is_off_while_sampling():
    overrides = {"num_layers": 1, "hidden_size": 32, "dropout": 0.5}
    model = build_model(model_config(Model(overrides=overrides)), "gpt")
    model.init_weights(seed=3)
    model.train()
    assert len({tuple(generate(model, PROMPT, 6, temperature=0)) for _ in range(4)}) == 1


@pytest.mark.parametrize("kind", ["spm", "l3", "chatml"])
def test_a_text_is_continued_as_transformers_would(tmp_path, monkeypatch, capsys, kind):
    folder = save_kind(
        tmp_path / "tokenizer", kind, **({"bos_token": "<|im_start|>"} if kind == "chatml" else {})
    ).parent
    theirs = AutoTokenizer.from_pretrained(folder)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')  # of the checkpoint
    asked = []

    def sample(config, path, prompt, ends, options):
        asked.append((prompt, set(ends)))
        return theirs(f"{options.prompt} the mat 日").input_ids[len(theirs(options.prompt).input_ids) :]

    monkeypatch.setattr("titan_like.checkpoint.inference.find_checkpoint", lambda config: tmp_path)
    monkeypatch.setattr(command, "sample", sample)

    def prompt_of(prompt, *settings):
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
    monkeypatch.setattr("titan_like.checkpoint.inference.find_checkpoint", lambda config: tmp_path)
    monkeypatch.setattr(command, "sample", lambda config, path, prompt, *more: prompts.append(prompt) or [])
    command.main([f"--data.tokenizer={path}", "--training.steps=1", "--prompt", ""])
    assert prompts == [[Tokenizer.from_file(str(path)).token_to_id(first)]]
