"""Proof that resuming equals never stopping and that N ranks equal one, or what differs first."""
