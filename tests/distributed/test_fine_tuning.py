"""Fine-tuning from a folder of transformers is its own plain loop over single conversations, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.launch import Case, assert_same, base_config, collect, losses_of_layouts, run_cases
from tests.distributed.layouts import pipeline, recompute, sizes, tensor, zero
from tests.float64 import bound, in_float64
from tests.unit.chat_cases import CHATML, VOCAB_SIZE, conversations, save_tokenizer, write_lines
from tests.unit.hugging_face_cases import gpt_config, llama_config, moe_config, reference_model
from tests.unit.plain_loop import plain_adamw
from tests.unit.template_cases import PUBLISHED, save_published
from titan_like.config import load_config
from titan_like.data.text.tokenizer import build_tokenizer
from titan_like.evaluate.inference import config_of_checkpoint, find_checkpoint, load_for_inference
from titan_like.evaluate.sampling import Sampling, generate, stop_ids
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer

BATCH, SEQ = 4, 128
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}},
    2: {
        "tensor 2": tensor(2, True),
        "pipeline 2": pipeline(2),
        "context 2": {"parallelism.context_parallel_degree": 2},
        "ring 2": {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_method": "ring"},
        "data 2, ZeRO 3": zero(3),
    },
}
EXPERTS, CHOSEN, BALANCE, Z = 8, 2, 0.5, 0.1  # and factors of a layer's losses
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {  # of 4 processes
    "context 2, tensor 2, experts 2": tensor(2, True)
    | {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_method": "ulysses"}
    | {"parallelism.expert_parallel_degree": 2},
    "pipeline 2, ring 2, recomputed": pipeline(2, "zbv_zero_bubble")
    | {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_method": "ring"}
    | recompute("full"),
    "experts 4, ZeRO 3": zero(3) | {"parallelism.expert_parallel_degree": 4},
}


def chat_settings(folder: Path, chats: list[list[dict[str, str]]]) -> dict[str, Any]:
    """Settings of a run on conversations, with the tokenizer that is beside a model of transformers."""
    spec = save_tokenizer(folder / "hf", CHATML)
    write_lines(folder / "chats.jsonl", [{"messages": messages} for messages in chats])
    return sizes(SEQ, 1, BATCH) | {
        "data.dataset": "conversations", "data.paths": [str(folder / "chats.jsonl")], "data.tokenizer": str(spec),
        "data.split": "1,0,0", "data.reset_attention_mask": True, "data.reset_position_ids": True,
        "training.max_norm": 0.0,
    }  # fmt: skip


def labelled(chat: Any, conversation: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Tokens of a conversation in ChatML and their labels by hand: -100 for all but answers with their <|im_end|>."""
    tokens, labels = list[int](), list[int]()
    for message in conversation:
        header, text, newline = (
            chat(part, add_special_tokens=False)["input_ids"]
            for part in (f"<|im_start|>{message['role']}\n", f"{message['content']}<|im_end|>", "\n")
        )
        tokens += [*header, *text, *newline]
        learned = text if message["role"] == "assistant" else [-100] * len(text)
        labels += [-100] * len(header) + learned + [-100] * len(newline)
    assert tokens == chat.apply_chat_template(conversation, return_dict=True)["input_ids"]
    return tokens, labels


@pytest.mark.parametrize("steps", [4, pytest.param(30, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("family", ["llama", "gpt", "moe"])
def test_steps_equal_a_plain_loop_over_transformers(tmp_path: Path, family: str, steps: int) -> None:
    """The reference computes each conversation by itself, so packing, masks and positions have to be exact.

    Nor has it any padding. So experts are balanced over the tokens of conversations alone, prompts among them.
    """
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_layers": 2, "max_seq_len": SEQ, "vocab_size": VOCAB_SIZE}
    if family == "moe":
        sizes |= {"num_experts": EXPERTS, "balance_coefficient": BALANCE, "z_loss_coefficient": Z}
    shape = {"llama": llama_config, "gpt": gpt_config, "moe": moe_config}[family](**sizes)
    theirs = reference_model(shape)
    theirs.save_pretrained(tmp_path / "hf")
    chats = [*conversations(300), *conversations(9, seed=1, most_turns=9)]  # some are longer than a sample
    settings = chat_settings(tmp_path, chats) | {
        "model.family": family,
        "model.overrides": shape.model_dump(mode="json", exclude_none=True),
        "checkpoint.initial_load_path": str(tmp_path / "hf"),
        "training.steps": steps,
        "training.dtype": "float64",
    }
    found = {}
    for ranks, layouts in ({1: LAYOUTS[1]} if family == "gpt" else LAYOUTS).items():
        found |= collect(losses_of_layouts, ranks, tmp_path, layouts, settings)[0]

    run = prepare_run(resolve_settings(base_config(tmp_path, settings), 1))
    chat = PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    known = {
        tuple(tokens[:-1][:SEQ]): (tokens[: SEQ + 1], labels) for tokens, labels in (labelled(chat, c) for c in chats)
    }
    with in_float64():
        theirs = type(theirs).from_pretrained(tmp_path / "hf", dtype=torch.float64).train()
    routes = {"output_router_logits": True} if family == "moe" else {}
    theirs.config._experts_implementation = "eager"  # others know no float64
    optimizer = plain_adamw(theirs, run.config.optimizer)
    source, expected, seen = run.datasets["train"], list[float](), 0
    loads = [torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64)] * 2  # of each layer, a step before
    for step in range(steps):
        total, count, routed = torch.zeros((), dtype=torch.float64), 0, list[tuple[torch.Tensor, ...]]()
        for index in range(BATCH * step, BATCH * (step + 1)):
            sample = source[index]
            inputs, begins, padding = (x.tolist() for x in (sample[0], sample.document_starts, sample.padding_mask))
            for begin in sorted(set(begins)):
                packed = tuple(token for token, own in zip(inputs, begins, strict=True) if own == begin)
                found_one = known.get(packed)
                assert (found_one is None) == padding[begin]
                if found_one is None:  # what fills the sample up
                    assert begin == max(begins) and set(packed) == {4}
                    continue
                tokens, labels = found_one
                with in_float64():
                    result = theirs(input_ids=torch.tensor([tokens[:-1]]), **routes)
                logits = result.logits[0]
                routed += [result.router_logits] if family == "moe" else []
                goal = torch.tensor(labels[1 : len(tokens)])
                total = total + F.cross_entropy(logits, goal, ignore_index=-100, reduction="sum")
                count, seen = count + int((goal != -100).sum()), seen + 1
        balance = torch.zeros_like(total)
        for layer, logits in enumerate(map(torch.cat, zip(*routed, strict=True))):
            balance = balance + BALANCE * EXPERTS * (logits.softmax(1).mean(0) @ loads[layer])
            balance = balance + Z * logits.logsumexp(1).square().mean()
            chosen = torch.bincount(logits.topk(CHOSEN).indices.flatten(), minlength=EXPERTS)
            loads[layer] = chosen.double() / chosen.sum()
        (total / count + balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total.item() / count)
    assert seen > 2 * steps * BATCH  # so samples hold several conversations
    assert expected[-1] < expected[0] - 0.015 * steps
    for name in found:
        assert found[name] == pytest.approx(expected, rel=bound(4096 * steps)), name


@pytest.mark.exhaustive
def test_experts_of_every_layout_count_the_same_tokens(tmp_path: Path) -> None:
    """In one sample of two nine tokens of ten are padding, so some processes have nothing else."""
    model = {"hidden_size": 64, "num_layers": 4, "num_kv_heads": 4, "expert_ffn_hidden_size": 48}
    model |= {"vocab_size": VOCAB_SIZE, "balance": "bias", "balance_coefficient": BALANCE, "z_loss_coefficient": Z}
    model |= {"bias_update_rate": 0.02}
    settings = chat_settings(tmp_path, conversations(5)) | {"model.family": "moe", "model.overrides": model}
    settings |= {"training.dtype": "float64", "training.steps": 3, "training.seq_len": 256}
    alone = run_cases([Case("one", settings | {"training.micro_batch_size": BATCH})], 1, tmp_path)["one"]
    cases = [Case(name, settings | layout) for name, layout in EXPERT_LAYOUTS.items()]
    for result in run_cases(cases, 4, tmp_path).values():
        assert_same(result, alone, bound(4096 * 3))


SHORT = [("the cat", "sat on"), ("the dog", "the log")]
STOPPING = ("glm4", "deepseek_r1")


def fine_tune(rank: int, root: Path) -> dict[str, Any]:
    """Fine-tune and export a small model of each template, on one turn and on two."""
    for name in STOPPING:
        folder = root / name
        settings = [
            *[f"--job.dump_folder={folder}/run", f"--model.from={folder}/hf", "--training.steps=60"],
            *["--data.dataset=conversations", f"--data.paths={folder}/chats.jsonl", "--data.split=1,0,0"],
            *["--data.reset_attention_mask=true", "--data.reset_position_ids=true", "--optimizer.lr=3e-3"],
            *["--training.seq_len=64", "--training.global_batch_size=2", "--training.micro_batch_size=2"],
            *["--checkpoint.enable=true", "--checkpoint.interval=60", "--checkpoint.hugging_face_interval=60"],
            "--evaluation.interval=0",
        ]
        Trainer(prepare_run(resolve_settings(load_config(settings)))).train()
    return {}


def test_a_tuned_model_stops_as_its_source_does(tmp_path: Path) -> None:
    """By the ends in the source's generation_config.json, in transformers and here, after each of two answers."""
    import transformers

    for name in STOPPING:
        folder = tmp_path / name
        save_published(folder / "hf", name)
        torch.manual_seed(1)
        reference_model(llama_config(hidden_size=64, num_layers=2, max_seq_len=64, vocab_size=400)).save_pretrained(
            folder / "aside"
        )
        for path in (folder / "aside").iterdir():
            if path.name != "generation_config.json":
                path.rename(folder / "hf" / path.name)
        roles = ("user", "assistant")
        turns = [[{"role": r, "content": t} for r, t in zip(roles, pair, strict=True)] for pair in SHORT]
        write_lines(folder / "chats.jsonl", [{"messages": messages} for messages in (*turns, turns[0] + turns[1])] * 4)
    collect(fine_tune, 1, tmp_path)
    for name in STOPPING:
        run = tmp_path / name / "run"
        exported = run / "hugging_face" / "step-60"
        theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
        tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
        ends = tokenizer.convert_tokens_to_ids(PUBLISHED[name][2])
        assert theirs.generation_config.eos_token_id == ends
        config = config_of_checkpoint(str(run), [])
        path = find_checkpoint(config)
        ours = load_for_inference(config, path, torch.device("cpu"))
        turns = [[{"role": "user", "content": SHORT[0][0]}]]
        turns.append(
            [*turns[0], {"role": "assistant", "content": SHORT[0][1]}, {"role": "user", "content": SHORT[1][0]}]
        )
        for messages, (_, answer) in zip(turns, SHORT, strict=True):
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            prompt = prompt[: -len(tokenizer("<think>\n")["input_ids"])] if name == "deepseek_r1" else prompt
            whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
            written = whole[len(prompt) :]
            stops = stop_ids(build_tokenizer(str(exported)), path)
            sampling = Sampling(40, temperature=0, stop_ids=stops)
            assert generate(ours, prompt, sampling) == [token for token in written if token not in ends]
            assert written[-1] in ends and len(written) < 40, name
            assert tokenizer.decode(written[:-1]).endswith(answer)
