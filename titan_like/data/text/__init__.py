"""Turns text into tokens, and tokens into packed samples."""
