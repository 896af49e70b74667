"""Puts measured results, which pages of docs/ link to although they lie outside it, into the site."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = "benchmarks/results"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the results to the site's files."""
    for path in sorted((Path(__file__).parents[1] / RESULTS).glob("*.json")):
        files.append(File.generated(config, f"{RESULTS}/{path.name}", abs_src_path=str(path)))


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links lead to them."""
    return markdown.replace(f"](../{RESULTS}/", f"]({RESULTS}/")
