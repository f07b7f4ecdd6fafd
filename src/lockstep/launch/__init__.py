"""Start the processes of a run and supervise them."""
