"""Conversations as samples that train a model on the answers."""
