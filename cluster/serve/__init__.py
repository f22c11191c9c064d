"""The composition root: the Ray application, its actors, rollout, capacity and start."""
