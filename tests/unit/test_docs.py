"""The pages of docs/ and README.md as a browser shows them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
REM, GRID, SIDEBAR, MARGIN = 20, 61, 12.1, 1.2  # pixels of Material's rem up to 1600 pixels; its widths in rem
FONT, PADDING = 13.6, 16  # pixels of its code blocks
WIDEST = 0.617  # em of a character in SF Mono; Consolas has 0.55, DejaVu Sans Mono 0.602


def test_lines_of_code_fit_on_a_screen_of_1280_pixels() -> None:
    assert "toc.integrate" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")  # no second sidebar
    fits = int((REM * (GRID - SIDEBAR - 2 * MARGIN) - 2 * PADDING) / (FONT * WIDEST))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        assert not [(page.name, line) for block in blocks for line in block.splitlines() if len(line) > fits]
