"""Proof that a parallel layout computes the same training as one process."""
