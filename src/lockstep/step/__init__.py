"""One optimizer step: forward and backward passes, the update, and the report."""
