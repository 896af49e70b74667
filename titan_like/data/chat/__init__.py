"""Turns conversations into samples that train a model on the answers."""
