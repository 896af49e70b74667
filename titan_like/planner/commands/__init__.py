"""The commands of `scripts/plan.py`, one module each, with `add_options(parser)` and `run(options, settings)`."""
