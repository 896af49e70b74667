"""The data pipeline, from text files to batches of tokens."""
