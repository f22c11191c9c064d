"""What could go wrong on this machine before anything starts, and what does go wrong in a running cluster."""
