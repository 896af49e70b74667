"""Models on the Hugging Face hub."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from titan_like.config.errors import ConfigError, first_line
from titan_like.data.tokenizer import is_on_hub

_PATTERNS = ["*.json", "*.safetensors", "*.model"]


def local_folder(name: str, key: str) -> Path:
    """The folder that ``name`` stands for: a path, or org/name on the hub, which is downloaded to its cache once.

    Args:
        name: a path, or the name of a repository. A path that exists comes first.
        key: the setting that errors blame.

    Raises:
        ConfigError: there is no such folder, and the hub does not have the repository or cannot be reached.
    """
    if not is_on_hub(name):
        return Path(name)
    from huggingface_hub import HfApi, snapshot_download  # which the package tokenizers brings

    with suppress(Exception):
        return Path(snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=True))
    try:
        HfApi().model_info(name, timeout=30)  # fails at once, where a download would be tried for half a minute
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # of the network, or the hub's answer
        problem = f"no such folder, nor can the Hugging Face hub give it ({first_line(error)})"
        raise ConfigError(key, name, f"{problem}; name a folder that is there") from None
