"""The engine of a replica: blocks, scheduler and batch (the brain's side), executor and sampler (the rank's)."""
