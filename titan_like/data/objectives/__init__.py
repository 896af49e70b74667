"""Turns samples into what a model learns: masked tokens, missing spans, pairs, choices, masks of packed documents."""
