"""The training loop and everything around it: checks, setup, health, signals."""
