"""Observing a run: one record per rank, and everything shown from it."""
