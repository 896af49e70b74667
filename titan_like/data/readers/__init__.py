"""Readers and writers of files: documents, records, indexed datasets, and shards of a stream."""
