"""Model families: plain single-device transformers and the TOML registry of their flavors."""
