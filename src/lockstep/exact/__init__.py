"""Exact mode: the same bits for every number of ranks."""
