"""Sampling from trained models."""
