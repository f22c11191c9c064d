"""The exchange of records between the store servers of two nodes."""
