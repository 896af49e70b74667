"""One validated JobConfig from one TOML file and command-line overrides."""

from titan_like.config.errors import ConfigError
from titan_like.config.load import load_config
from titan_like.config.schema import JobConfig

__all__ = ["ConfigError", "JobConfig", "load_config"]
