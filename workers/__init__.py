"""A replica: one engine core that decides and n ranks that compute. Imports torch in the ranks only."""
