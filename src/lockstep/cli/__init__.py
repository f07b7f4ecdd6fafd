"""The `lockstep` command: one verb per file, torch imported by none before it is needed."""
