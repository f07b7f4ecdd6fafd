"""How fast a command trains, where the time goes, and what more GPUs would do for it."""
