"""What `scripts/plan.py` does, one module a command: `add_options(parser)` and `run(options, settings)`."""
