"""`tandem doctor`: what of this machine and of a running cluster is not as it should be, and the remedy."""
