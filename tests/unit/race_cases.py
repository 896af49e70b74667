"""A small data set in the form of RACE, whose right options are words of the passage."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from titan_like.data.objectives.race import Question

WORDS = [f"w{number}" for number in range(12)]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "which", "?", *WORDS]


def write_race(root: Path, passages: dict[str, int]) -> Path:
    """A folder with passages of 3 questions in each half of the splits (split → number), and tokenizer.json in it."""
    generator = random.Random(0)
    for split, count in passages.items():
        for group, size in (("middle", 3), ("high", 6)):
            (root / split / group).mkdir(parents=True)
            for number in range(count):
                record = {"article": [], "questions": [], "options": [], "answers": [], "id": f"{group}{number}.txt"}
                passage = generator.sample(WORDS, size)
                record["article"] = " \n ".join(passage)
                for _ in range(3):
                    answer = generator.randrange(4)
                    options = generator.sample([word for word in WORDS if word not in passage], 4)
                    options[answer] = generator.choice(passage)
                    record["questions"].append(generator.choice(["which", "which _ ?"]))
                    record["options"].append(options)
                    record["answers"].append("ABCD"[answer])
                (root / split / group / f"{number}.txt").write_text(json.dumps(record) + "\n")
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(root / "tokenizer.json"))
    return root


@torch.no_grad()
def scores_of_transformers(reference, questions: list[Question], seq_len: int) -> torch.Tensor:
    """transformers' scores of the options: [questions, 4]."""
    found = []
    for question in questions:
        rows = []
        for option in question.options:
            ids = [2, *option.tolist(), 3, *question.passage.tolist(), 3]
            types = [0] * (len(option) + 2) + [1] * (len(question.passage) + 1)
            rows.append([row + [0] * (seq_len - len(ids)) for row in (ids, types, [1] * len(ids))])
        ids, types, attention = torch.tensor(rows).unbind(1)
        found.append(
            reference(input_ids=ids[None], token_type_ids=types[None], attention_mask=attention[None]).logits[0]
        )
    return torch.stack(found)
