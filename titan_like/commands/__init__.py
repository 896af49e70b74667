"""The command lines: parsing of arguments and printing, over the other packages.

A module's `main(argv)` returns the exit code. Its `run()` is what the installed command (titan-plan) and the file in a
checkout (scripts/plan.py) call.
"""
