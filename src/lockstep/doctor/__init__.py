"""`lockstep doctor`: check this machine, and the job about to run on it."""
