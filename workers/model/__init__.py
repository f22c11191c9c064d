"""The decoder: configuration and fingerprint (no torch) and, in their own modules, weights and layers."""
