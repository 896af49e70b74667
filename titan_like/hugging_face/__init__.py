"""Hugging Face folders: reading them, and converting checkpoints to and from them."""
