"""Conversations: what is learned of them, how they are packed, and what is refused."""

import json
import random
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from tests.unit.chat_cases import (
    ALPACA,
    CHATML,
    GENERATION,
    HEADER,
    MARKED,
    TEMPLATES,
    TOOLS,
    VOCAB_SIZE,
    conversations,
    learned,
    prepended,
    save_tokenizer,
    word_pieces,
    write_lines,
)
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import JobConfig
from titan_like.data.chat.template import Chat
from titan_like.data.loading.describe import describe_data
from titan_like.data.loading.open_source import open_data
from titan_like.data.source import Source
from titan_like.models.registry import model_config

SEQ = 64
MASKS = ["--data.reset_attention_mask=true", "--data.reset_position_ids=true"]


def config_of(folder: Path, *settings: str) -> JobConfig:
    return load_config(
        [
            *["--data.dataset=conversations", f"--data.paths={folder}/chats.jsonl", f"--training.seq_len={SEQ}"],
            *["--data.split=1,0,0", f"--model.overrides.vocab_size={VOCAB_SIZE}", "--training.steps=9", *MASKS],
            *[f"--job.dump_folder={folder}/out", "--evaluation.interval=0", *settings],
        ]
    )


def opened(folder: Path, *settings: str) -> dict[str, Source]:
    config = config_of(folder, *settings)
    return open_data(config, model_config(config.model))


def encoded(chat: Chat, record: Any) -> list[list[int]]:
    """The tokens of a record, and which are learned."""
    return [x.tolist() for x in chat.encode(record)]


@pytest.mark.parametrize(
    ("template", "answers", "expected"),
    [
        # "\n\n" is one token at the end of the text, and two before a letter. An end is added.
        (ALPACA, ["4", "5"], [["4", "Ċ", "Ċ"], ["5", "ĊĊ", "</s>"]]),
        (HEADER, ["4", "5"], [["4", "<|im_end|>"], ["5", "<|im_end|>"]]),
        # No token has the space before the second answer among its characters.
        (GENERATION, ["4", " 5", "6"], [["4", "<|im_end|>"], ["Ġ", "5", "<|im_end|>"], ["6", "<|im_end|>"]]),
    ],
)
def test_tokens_at_the_borders_of_answers(
    tmp_path: Path, template: str, answers: list[str], expected: list[list[str]]
) -> None:
    spec = save_tokenizer(tmp_path, template, "\n\n", post_processor=processors.ByteLevel(trim_offsets=True))
    messages = [m for answer in answers for m in (USER, {"role": "assistant", "content": answer})]
    tokenizer, (tokens, is_answer) = Tokenizer.from_file(str(spec)), Chat(str(spec)).encode({"messages": messages})
    runs = [list(run) for learns, run in groupby(zip(tokens, is_answer, strict=True), key=lambda x: x[1]) if learns]
    assert [[tokenizer.id_to_token(token) for token, _ in run] for run in runs] == expected


def test_a_prompt_with_an_answer_needs_no_template(tmp_path: Path) -> None:
    chat = Chat(str(save_tokenizer(tmp_path, None)))
    assert learned(chat, {"prompt": "the sum of 1 and 2", "answer": "3"}) == ["3</s>"]
    tokens, is_answer = encoded(Chat("byte"), {"prompt": "é=", "answer": "1"})
    assert tokens == [195, 169, 61, 49, 256] and is_answer == [False] * 3 + [True] * 2


@pytest.mark.parametrize(
    ("build", "prompt", "answer", "expected"),
    [
        (prepended, "17+25=", "2", ["2"]),
        (prepended, "17+25=", "42", ["=4", "2"]),  # which reaches over the border
        (prepended, "17+25= ", "a", ["▁a"]),
        (prepended, "17+25=", "é2", ["<0xC3>", "<0xA9>", "2"]),
        (prepended, "17é", "2", ["2"]),
        (prepended, "", "2", ["▁", "2"]),
        (word_pieces, "17 + 17=", "42", ["42"]),
        (word_pieces, "un", "known a", ["##known", "a"]),  # a word is one text
    ],
)
def test_a_prompt_with_its_answer_is_one_text(
    tmp_path: Path, build: Callable[[], Tokenizer], prompt: str, answer: str, expected: list[str]
) -> None:
    tokenizer = build()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens, is_answer = Chat(str(tmp_path / "tokenizer.json")).encode({"prompt": prompt, "answer": answer})
    assert tokens[:-1].tolist() == tokenizer.encode(prompt + answer, add_special_tokens=False).ids
    answers = [tokenizer.id_to_token(token) for token in tokens[is_answer]]
    assert answers == [*expected, tokenizer.id_to_token(tokens[-1])]


CALL: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "x"}]}
CALL["tool_calls"][0]["function"] = {"name": "add", "arguments": {"first": 1, "second": "two"}}
REPLY, PARTS = {"role": "tool", "name": "add", "content": "3"}, [{"type": "text", "text": "the sum"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_of_a_record_are_written(tmp_path: Path) -> None:
    chat = Chat(str(save_tokenizer(tmp_path, TOOLS)))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    silent = {key: value for key, value in CALL.items() if key != "content"}
    messages = [USER, CALL, REPLY, REPLY, silent, REPLY, ANSWER]
    record = {"messages": messages, "tools": json.dumps([TOOL])}
    expected = theirs.apply_chat_template(messages, tools=[TOOL], return_dict=True)["input_ids"]
    assert encoded(chat, record)[0] == expected
    call = '<call>{"name": "add", "arguments": {"first": 1, "second": "two"}}</call><|im_end|>'
    assert learned(chat, record) == [call, call, "b<|im_end|>"]


def test_every_form_of_a_record_is_the_same_conversation(tmp_path: Path) -> None:
    chat = Chat(str(save_tokenizer(tmp_path, TOOLS)))
    messages = [{"role": "system", "content": "s"}, USER, CALL, REPLY | {"name": ""}, ANSWER]
    expected = encoded(chat, {"messages": messages, "tools": [TOOL]})
    shared: list[dict[str, Any]] = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": json.dumps(CALL["tool_calls"][0]["function"])},
        {"from": "observation", "value": "3", "name": ""},
        {"from": "gpt", "value": "b", "weight": 1},
    ]
    tools = json.dumps([TOOL])
    for record in (
        {"conversations": shared, "system": "s", "tools": tools},
        {"conversations": [{"from": "system", "value": "s"}, *shared], "tools": [tools[1:-1]]},
        {"conversations": json.dumps(messages), "tools": tools},
    ):
        assert encoded(chat, record) == expected
    in_parts = [USER | {"content": PARTS}, ANSWER | {"content": PARTS}]
    assert learned(chat, {"messages": in_parts}) == ["the sum<|im_end|>"]
    for record in (
        {"prompt": "a", "answer": "b"},
        {"prompt": "a", "completion": "b"},
        {"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])},
        {"messages": None, "conversations": [USER, ANSWER]},
    ):
        assert encoded(chat, record) == encoded(chat, {"messages": [USER, ANSWER]})
    assert learned(chat, {"prompt": "[]", "completion": "[]"}) == ["[]<|im_end|>"]  # texts


END = "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "answer", "end"),
    [
        (CHATML + END, "b<|im_end|>", "\n</s>"),
        (CHATML + "{{ eos_token }}", "b<|im_end|>", "\n</s>"),  # also of a prompt
        (TOOLS + END, "b<|im_end|>", "\n</s>"),  # which writes no prompt without messages
        (TEMPLATES["llama"].replace(" </s>", "") + "</s>", " b", "</s>"),
    ],
)
def test_what_ends_every_text_hides_no_answer(tmp_path: Path, template: str, answer: str, end: str) -> None:
    chat = Chat(str(save_tokenizer(tmp_path, template)))
    for turns in ([USER, ANSWER, USER, ANSWER], [ANSWER, USER, ANSWER]):
        expected = chat.template.apply_chat_template(turns, return_dict=False)
        assert encoded(chat, {"messages": turns})[0] == expected
        assert learned(chat, {"messages": turns}) == [answer, answer + end]
    assert learned(chat, {"messages": [USER, ANSWER, USER]}) == [answer]


def test_a_special_token_that_takes_in_white_space_before_it_belongs_to_its_own_message(tmp_path: Path) -> None:
    file = save_tokenizer(tmp_path, CHATML)
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        token["lstrip"] = token["content"] in ("<|im_start|>", "<|im_end|>")
    file.write_text(json.dumps(tokenizer))
    assert learned(Chat(str(file)), {"messages": [USER, ANSWER, USER, ANSWER]}) == ["b<|im_end|>"] * 2


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_in_a_prompt_are_not_learned(tmp_path: Path, template: str) -> None:
    chat = Chat(str(save_tokenizer(tmp_path, template)))
    prompt = [USER, {"role": "assistant", "content": "1"}, USER]
    assert learned(chat, {"prompt": prompt, "completion": [ANSWER]}) == ["b<|im_end|>"]


def test_conversations_are_read_from_parquet_and_arrow(tmp_path: Path) -> None:
    """Arrow fills up every struct with the keys of the others, which are not the conversation's."""
    spec = save_tokenizer(tmp_path, TOOLS)
    records = [
        {"messages": [USER, CALL, REPLY, ANSWER], "tools": [TOOL], "id": 1},
        {"messages": [USER, {"role": "assistant", "content": "c", "reasoning_content": "d"}], "id": 2},
    ]
    write_lines(tmp_path / "chats.jsonl", records)
    expected = opened(tmp_path, f"--data.tokenizer={spec}")["train"].fingerprint
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, tmp_path / "chats.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "chats.arrow"), table.schema) as writer:
        writer.write_table(table)
    for ending in ("parquet", "arrow"):
        paths = f"--data.paths={tmp_path}/chats.{ending}"
        assert opened(tmp_path, f"--data.tokenizer={spec}", paths)["train"].fingerprint == expected


def test_bad_lines_are_skipped_and_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = [json.dumps(record).encode() for record in pairs(40)]
    bad = [b"{", b'{"prompt": "a"}', b'{"prompt": "\xff", "answer": "b"}', b'{"messages": []}']
    (tmp_path / "chats.jsonl").write_bytes(b"\n".join([*good[:5], *bad, *good[5:]]))
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "chats.jsonl").write_bytes(b"\n".join(good))
    skipping = opened(tmp_path, "--data.bad_lines=skip")["train"]
    told = capfd.readouterr().err
    assert f"skipped {tmp_path}/chats.jsonl:6: the line is not JSON" in told and "skipped 4 of 44 records" in told
    assert skipping.fingerprint == opened(tmp_path / "good")["train"].fingerprint
    with pytest.raises(ConfigError, match=r"chats\.jsonl:6"):  # what has been skipped does not pass for all
        opened(tmp_path)


USER, SYSTEM = {"role": "user", "content": "a"}, {"role": "system", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


def of(*messages: object) -> str:
    return json.dumps({"messages": messages})


WRONG = CHATML.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}<s>")
TOTAL = CHATML + "{{ messages | map(attribute='content') | join | length }}"
ROLES = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}</s>{% endif %}"
ROLES += "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "line", "words"),
    [
        (CHATML, '{"messages": [', "the line is not JSON"),
        (CHATML, '"a"', 'has no "messages", "conversations"'),
        (CHATML, of(), 'no "assistant" that answers'),
        (CHATML, of({"content": "a"}), 'message 1 has neither a "role" nor "value" and "from"'),
        (CHATML, of(USER, {"role": "assistant", "content": 3}), '"content" of message 2 is'),
        (CHATML, json.dumps({"conversations": [{"from": "bard", "value": "a"}]}), '"from", which is one of system'),
        (CHATML, of(USER, {"role": "assistant", "content": [{}]}), "a list of parts"),
        (CHATML, json.dumps({"prompt": "a", "answer": 3}), 'or "prompt" with "answer" or "completion"'),
        (CHATML, json.dumps({"prompt": [USER, ANSWER], "completion": [USER]}), 'no "assistant" that answers'),
        (CHATML, '{"prompt": "\\ud800", "answer": "b"}', "half a surrogate pair"),
        (None, of(USER, ANSWER), "the tokenizer's folder has no chat template"),
        (TEMPLATES["llama"], of(SYSTEM, USER, ANSWER), "refuses the record (no system here)"),
        ("{{ ''.__class__.mro() }}", of(USER, ANSWER), "refuses the record (access to attr"),
        (WRONG, of(USER, ANSWER), "does not begin with the end of the chat template"),
        (TOTAL, of(USER, ANSWER, USER, ANSWER), 'or give "prompt" and "completion" as texts, without a chat template'),
        (CHATML, of(USER, ANSWER | {"weight": 0.5}), '"weight" is 0.5; give 0 or 1, or true or false; correct'),
        (CHATML, of(USER, ANSWER | {"train": "no"}), '"train" is "no"; give 0 or 1'),
        (CHATML, of(USER, ANSWER | {"masked": True}), 'no "assistant" that answers and is learned'),
        (None, json.dumps({"prompt": "a", "answer": "b", "train": False}), "answers and is learned"),
        (CHATML, json.dumps({"prompt": "a", "answer": "b", "loss": [0, 1, 1]}), '"loss" has 3 values for 2 messages'),
        (CHATML, of(USER, ANSWER | {"tool_calls": [{"id": 1}]}), 'of message 2 has no function with a "name"'),
        (CHATML, of(USER | {"content": [PARTS[0], {"type": "image"}]}, ANSWER), "one is no text (type image)"),
        (ROLES, of(USER, ANSWER, REPLY, ANSWER), 'leaves out the text of a message with the role "tool" ("3")'),
        (ROLES, of(USER, CALL, ANSWER), 'leaves out the text of a message with the role "assistant" ("a call")'),
        (
            CHATML,
            json.dumps({"prompt": "a", "answer": "b", "chat_template_kwargs": {"tools": []}}),
            '"chat_template_kwargs" cannot set "tools"',
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, template: str | None, line: str, words: str) -> None:
    spec = save_tokenizer(tmp_path, template)
    (tmp_path / "chats.jsonl").write_text(f"\n\n{line}\n")
    with pytest.raises(ConfigError) as error:
        opened(tmp_path, f"--data.tokenizer={spec}")
    message = str(error.value)
    assert message.startswith(f'data.paths = "{tmp_path}/chats.jsonl:3": ') and words in message, message
    assert message.endswith('; correct or remove it, or set data.bad_lines to "skip"') and "\n" not in message
    assert not [path for path in (tmp_path / "out" / "data_cache").iterdir() if path.suffix != ".lock"]


def test_other_files_and_a_larger_vocabulary_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "chats.jsonl", [{"prompt": "a", "answer": "b"}])
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"conversations are records of \.jsonl, \.parquet, \.arrow, \.csv files"):
        opened(tmp_path, f"--data.paths={tmp_path}/a.txt")
    spec = save_tokenizer(tmp_path, CHATML)
    with pytest.raises(ConfigError, match=r"it has [0-9]+ tokens, but the model's vocab_size is 300"):
        opened(tmp_path, f"--data.tokenizer={spec}", "--model.overrides.vocab_size=300")


def pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Sums whose prompts all differ."""
    draw = random.Random(seed)
    return [
        {"prompt": f"{number}+{draw.randint(0, 10**6)}=", "answer": "9" * draw.randint(1, 9)} for number in range(count)
    ]


def test_long_conversations_are_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    records = [
        {"prompt": "p" * 10, "answer": "a" * (SEQ - 10)},  # with its end SEQ + 1 tokens, which fit
        {"prompt": "p" * 10, "answer": "a" * (SEQ - 9)},
        {"prompt": "p" * SEQ, "answer": "ab"},  # of which the first letter is the last label
        {"prompt": "p" * (SEQ + 1), "answer": "a"},
    ]
    write_lines(tmp_path / "chats.jsonl", records)
    source = opened(tmp_path)["train"]
    assert source.described(1, 1) == (
        f"3 conversations in 3 samples | {3 * SEQ + 3} tokens, {SEQ - 9 + SEQ - 9 + 1} of answers"
        " | 3 longer than training.seq_len were cut, 1 of which had no answer left and are left out"
    )


def test_the_cache_follows_the_template_and_a_dry_run_does_not_tokenize(tmp_path: Path, capfd: Any) -> None:
    write_lines(tmp_path / "chats.jsonl", [{"messages": messages} for messages in conversations(30)])
    spec = save_tokenizer(tmp_path, CHATML)
    config = config_of(tmp_path, f"--data.tokenizer={spec}", f"--training.seq_len={4 * SEQ}")
    model = model_config(config.model)
    assert describe_data(config, model)[1] == "1 files, not tokenized yet, so not counted"
    before = open_data(config, model)["train"].fingerprint
    assert "passes over them" in describe_data(config, model)[1]
    assert capfd.readouterr().err.count("tokenized 1 files into") == 1
    save_tokenizer(tmp_path, TEMPLATES["llama"])
    assert open_data(config, model)["train"].fingerprint != before
    assert capfd.readouterr().err.count("tokenized 1 files into") == 1
