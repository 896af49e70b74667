"""Print the lines of Python in each folder, subfolders included. They are watched; nothing fails by them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Print one line a folder."""
    packages = sorted({path.parent for path in (ROOT / "titan_like").glob("*/*.py")})
    for folder in (ROOT / "titan_like", *packages, ROOT / "tests", ROOT / "benchmarks"):
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))
        print(f"{lines:7,} {folder.relative_to(ROOT).as_posix()}")


if __name__ == "__main__":
    main()
