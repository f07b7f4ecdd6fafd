"""What a run says about itself: one record per rank, and everything that is shown from it."""
