"""Parallel layouts and how they are applied to a model."""
