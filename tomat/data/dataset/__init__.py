"""From a user's folder of densities to the two shard sets of a run."""
