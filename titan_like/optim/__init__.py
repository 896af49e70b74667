"""Optimizer, learning rate, gradient norm, loss scale."""
