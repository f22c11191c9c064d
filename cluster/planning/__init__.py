"""Plan a cluster before it is bought: which devices, how the model is split, how many replicas of each role,
and what that costs. Arithmetic alone: no Ray, no torch, no device."""
