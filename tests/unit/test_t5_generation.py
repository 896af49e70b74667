"""T5 writes what transformers' T5 writes with the same weights and tokenizer."""

import json
from pathlib import Path

from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, T5ForConditionalGeneration

from tests.unit.hugging_face_cases import random_model, save_checkpoint, t5_config
from tests.unit.tokenizer_cases import trained
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.commands.generate import main
from titan_like.data.objectives.span_corruption import decode_with_sentinels, encode_with_sentinels
from titan_like.data.text.tokenizer import ByteTokenizer, build_tokenizer
from titan_like.hugging_face.convert import to_hugging_face

NEW_TOKENS = 24


def test_an_exported_byte_model_writes_what_generate_py_prints(tmp_path: Path) -> None:
    model = random_model(t5_config(vocab_size=359), size=0.4).float().eval()
    shape = model.config.model_dump()
    folder = tmp_path / "run"
    settings = {"data": {"tokenizer": "byte"}, "checkpoint": {"folder": str(folder)}}
    path = save_checkpoint(folder, model, **settings)
    to_hugging_face(CheckpointWeights(path), tmp_path / "hf", None, 10**9, "byte")
    theirs = T5ForConditionalGeneration.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (theirs.config.decoder_start_token_id, theirs.config.pad_token_id, theirs.config.eos_token_id) == (
        258,
        258,
        256,
    )
    ours, again = ByteTokenizer(), build_tokenizer(str(tmp_path / "hf" / "tokenizer.json"))
    assert (again.mask_id, again.pad_id, again.sentinel_ids) == (257, 258, ours.sentinel_ids)
    prompt = "def <extra_id_0>(é):\n    <extra_id_1>"
    inputs = tokenizer(prompt, return_tensors="pt")
    assert inputs.input_ids[0].tolist() == [*encode_with_sentinels(ours, prompt), 256]
    assert encode_with_sentinels(again, prompt) == encode_with_sentinels(ours, prompt)
    expected = theirs.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0, 1:].tolist()

    shown = tmp_path / "generated.json"
    overrides = [f"--model.overrides.{key}={json.dumps(value)}" for key, value in shape.items()]
    options = ["--prompt", prompt, "--temperature", "0", "--max_new_tokens", str(NEW_TOKENS), "--json", str(shown)]
    main([*options, "--model.family=t5", *overrides, f"--checkpoint.folder={folder}", "--training.steps=1"])
    found = json.loads(shown.read_text())
    assert found["tokens"] == expected[: len(found["tokens"])] and len(found["tokens"]) > 3
    assert found["continuation"] == decode_with_sentinels(ours, found["tokens"])


def test_sentinels_in_text() -> None:
    tokenizer = ByteTokenizer()
    text = "a<extra_id_0>b<extra_id_99><extra_id_1>"
    ids = encode_with_sentinels(tokenizer, text)
    assert ids == [97, 259, 98, 358, 260] and decode_with_sentinels(tokenizer, ids) == text
    for plain in ("<extra_id_100>", "<extra_id_>", "<extra_id_0", ""):
        assert encode_with_sentinels(tokenizer, plain) == list(plain.encode())


def test_spans_keep_their_spaces(tmp_path: Path) -> None:
    """As transformers decodes the whole, where it does not leave out the sentinels."""
    special = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{number}>" for number in range(3))]
    texts, spaces = ["the cat sat on the mat"] * 3, {"pre_tokenizer": pre_tokenizers.Metaspace()}
    joined = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    settings = {"unk_token": "<unk>", "decoder": decoders.Metaspace()}
    t5 = trained(models.Unigram(), texts, 40, special, **settings, **spaces)
    llama = trained(models.BPE(unk_token="<unk>"), texts, 60, special, decoder=joined, **spaces)
    for number, made in enumerate((t5, llama)):
        made.save(str(tmp_path / f"{number}.json"))
        tokenizer = build_tokenizer(str(tmp_path / f"{number}.json"))
        text = "<extra_id_0> cat sat<extra_id_1> on the<extra_id_2> mat"
        ids = [tokenizer.pad_id or 0, *encode_with_sentinels(tokenizer, text), tokenizer.eod_id]
        assert decode_with_sentinels(tokenizer, ids) == text
