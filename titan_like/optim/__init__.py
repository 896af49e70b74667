"""Optimizers, learning-rate schedule, gradient norm and loss scaling."""
