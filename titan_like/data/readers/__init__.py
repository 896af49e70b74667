"""Reads and writes files: documents, records, indexed datasets, and shards of a stream."""
