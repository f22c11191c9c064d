"""How many replicas each pool has, and which role each plays: desired counts, policy, role leases."""
