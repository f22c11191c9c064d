"""Policies: what each choice of replicas for a request is worth, and the choice that costs least."""
