"""Callers and their rights: identities from API keys, JWTs and client certificates."""
