"""Layers and helpers that several families share."""
