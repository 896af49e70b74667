"""Llama family."""
