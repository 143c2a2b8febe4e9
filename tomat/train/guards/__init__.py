"""What refuses to begin a run, what watches it, and what ends it in time."""
