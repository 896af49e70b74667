"""titan_like: large-language-model pretraining in native PyTorch."""

__version__ = "0.1.0"
