"""Bugs to put into the product: each a context manager within which it computes something else in some layouts.

The verifier's processes enter them by name, so they can be pickled.
"""
