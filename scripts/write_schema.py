"""Write what follows from the schema: train_configs/schema.json for editors, which complete and check the keys of run
TOMLs, and docs/settings.md.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the code next to this file, not an installed one

from titan_like.config.load import json_schema, settings_page  # noqa: E402
from titan_like.config.schema import JobConfig  # noqa: E402
from titan_like.models.registry import config_class  # noqa: E402

FAMILIES = ("gpt", "decoder", "bert", "t5")  # llama and moe have fields of decoder


def written() -> dict[str, str]:
    """The files' contents by their paths in the repository."""
    sections = {name: field.annotation for name, field in JobConfig.model_fields.items()}
    sections |= {f"model.overrides of {family}": config_class(family) for family in FAMILIES}
    return {"train_configs/schema.json": json_schema(JobConfig), "docs/settings.md": settings_page(sections)}


if __name__ == "__main__":
    for name, text in written().items():
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"wrote {ROOT / name}")
