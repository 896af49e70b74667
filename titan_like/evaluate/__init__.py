"""Sampling from trained models, and scoring them on tasks."""
