"""Write what follows from the schema: train_configs/schema.json for editors, which complete and check the keys of run
TOMLs, and docs/settings.md.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the code next to this file, not an installed one

from titan_like.config.load import described_options, purpose_of  # noqa: E402
from titan_like.config.schema import JobConfig  # noqa: E402
from titan_like.models.registry import config_class  # noqa: E402

ABOUT = """A TOML file has a table for each section; on the command line a key is `--section.key VALUE`.
[Configuration](configuration.md) describes the file format, and `python train.py --help` prints the same."""
FAMILIES = ("gpt", "decoder", "bert", "t5")  # llama and moe have fields of decoder


def settings_page(sections: Mapping[str, Any]) -> str:
    """The page of the documentation with a table for each section: its title → its class."""
    lines = ["<!-- scripts/write_schema.py writes this file. -->", "# Every setting", "", ABOUT]
    for title, section in sections.items():
        lines += [
            "",
            f"## {title}",
            "",
            purpose_of(section),
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for key, kind, default, meaning in described_options(section):
            cells = f"`{key}`", kind.replace(" | ", " or "), f"`{default}`", meaning.replace("<", "&lt;")
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def written() -> dict[str, str]:
    """The files' contents by their paths in the repository."""
    sections = {name: field.annotation for name, field in JobConfig.model_fields.items()}
    sections |= {f"model.overrides of {family}": config_class(family) for family in FAMILIES}
    schema = json.dumps(JobConfig.model_json_schema(), indent=2) + "\n"
    return {"train_configs/schema.json": schema, "docs/settings.md": settings_page(sections)}


if __name__ == "__main__":
    for name, text in written().items():
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"wrote {ROOT / name}")
