"""The API by version."""
