"""Measurements of a run: records, FLOPs, timelines, the log line and trackers."""
