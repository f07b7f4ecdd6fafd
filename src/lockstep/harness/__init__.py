"""Start a command, attach callbacks to its runs, follow it, end it with all its children."""
