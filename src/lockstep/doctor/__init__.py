"""Is this machine, and the job about to run on it, healthy: `lockstep doctor`."""
