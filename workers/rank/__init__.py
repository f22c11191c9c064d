"""The engine of a replica: scheduler and blocks (the brain's side), executor and sampler (the rank's)."""
