"""`tandem bench`: load on a running cluster, and policies replayed on recorded traces."""
