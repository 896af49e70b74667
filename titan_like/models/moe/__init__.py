"""The mixture-of-experts family."""
