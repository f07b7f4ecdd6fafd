"""Start a command, attach callbacks to its runs, watch it, and end it with all its children."""
