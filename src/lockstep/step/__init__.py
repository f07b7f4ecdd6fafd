"""One optimizer step: forward and backward passes, the update, and what it reports."""
