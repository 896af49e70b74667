"""Write what follows from the schema: train_configs/schema.json for editors, which complete and check the keys of run
TOMLs, and docs/settings.md; and docs/coming_from.md from the table of other tools' names.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the code next to this file, not an installed one

from titan_like.config.entry_points import MIXERS  # noqa: E402
from titan_like.config.formulas import names_in  # noqa: E402
from titan_like.config.load import described_options, purpose_of  # noqa: E402
from titan_like.config.monitoring import ValidationSet  # noqa: E402
from titan_like.config.schema import JobConfig  # noqa: E402
from titan_like.config.synonyms import Tool, shown_key, tools  # noqa: E402
from titan_like.models.decoder.config import LayerKind  # noqa: E402
from titan_like.models.registry import config_class  # noqa: E402
from titan_like.models.rope_scaling import RopeScaling  # noqa: E402

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
            kinds = [f"`{part}`" if part.startswith('"') else part for part in kind.split(" | ")]
            text = re.sub(r"docs/((\w+)\.md)", r"[\2](\1)", meaning.replace("<", "&lt;"))
            cells = f"`{key}`", " or ".join(kinds), f"`{default}`", text
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


COMING = """`titan-import` turns a settings file of another tool into a TOML:

```bash
python scripts/import_config.py train_gpt2.py --output my.toml
python scripts/import_config.py training_args.json --gpus 8 --output my.toml
```

The file's content tells the tool. The file is read as data and never run: of Python the assignments of literals and
arithmetic, of a shell script the options and the variables that it assigns. Variables without a value, such as
arguments of the script, remain as their names. `--gpus` is the number of processes, on which the global batch often
depends. Every key of the file gets a line: taken, with our key and value; not needed, with the reason; or not there,
with what the run lacks. What the tool assumes where the file is silent is written out if our default differs. The
result is checked as a run's settings are, except for the rules about a model that is not on this machine.

The tables show from which of their keys each of our settings follows; `gpus` is the number of processes. An unknown key
in a TOML or on the command line gets its hint from the same tables."""


def coming_page(known: Mapping[str, Tool]) -> str:
    """The page of the documentation with the keys of other tools."""
    lines = ["<!-- scripts/write_schema.py writes this file. -->", "# Coming from another tool", "", COMING]
    for tool in known.values():
        lines += ["", f"## {tool.title}", "", f"| {tool.title} | here |", "|---|---|"]
        for key, formula in tool.keys.items():
            lines.append(f"| {', '.join(f'`{name}`' for name in names_in(formula))} | `{shown_key(key)}` |")
        if tool.same:
            lines += ["", "Other names: " + ", ".join(f"`{old}` is `{new}`" for old, new in tool.same.items()) + "."]
        for title, reasons in (("not needed", tool.needless), ("not there", tool.missing)):
            lines += ["", f"| {title} | because |", "|---|---|"]
            for why in dict.fromkeys(reasons.values()):
                names = ", ".join(f"`{name.removeprefix('!')}`" for name in reasons if reasons[name] == why)
                lines.append(f"| {names} | {why} |")
    return "\n".join(lines) + "\n"


def written() -> dict[str, str]:
    """The files' contents by their paths in the repository."""
    sections = {name: field.annotation for name, field in JobConfig.model_fields.items()}
    sections["a table of evaluation.sets"] = ValidationSet
    sections |= {f"model.overrides of {family}": config_class(family) for family in FAMILIES}
    sections |= {"kinds.NAME of decoder": LayerKind, "rope_scaling of decoder": RopeScaling}
    mixers = {f"options of the mixer {name}": resolve_name(path) for name, path in MIXERS.items()}
    sections |= {title: mixer for title, mixer in mixers.items() if mixer.model_fields}
    schema = json.dumps(JobConfig.model_json_schema(), indent=2) + "\n"
    pages = {"docs/settings.md": settings_page(sections), "docs/coming_from.md": coming_page(tools())}
    return {"train_configs/schema.json": schema} | pages


if __name__ == "__main__":
    for name, text in written().items():
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"wrote {ROOT / name}")
