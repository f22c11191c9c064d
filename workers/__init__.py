"""A replica: one brain that decides and n ranks that compute. Imports torch in the ranks only."""
