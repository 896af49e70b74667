"""Layers that families share."""
