"""The command lines: parsing of arguments and printing.

A module's `main(argv)` returns the exit code. The installed command (titan-plan) and the script in a checkout
(scripts/plan.py) call its `run()`.
"""
