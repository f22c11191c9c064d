"""How many records a listing of a store has: what the gateway takes, and the command line offers."""

DEFAULT_LIMIT = 100
MAX_LIMIT = 10_000
