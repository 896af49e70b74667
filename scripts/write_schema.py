"""Write train_configs/schema.json, which editors use to complete and check the keys of run TOMLs."""

from pathlib import Path

from titan_like.config.load import json_schema
from titan_like.config.schema import JobConfig

if __name__ == "__main__":
    path = Path(__file__).parents[1] / "train_configs" / "schema.json"
    path.write_text(json_schema(JobConfig), encoding="utf-8")
    print(f"wrote {path}")
