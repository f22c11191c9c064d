"""Who calls, and what the caller may do: identities from API keys, JWTs and client certificates."""
