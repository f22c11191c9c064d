"""The operator's console: one page and its JSON, served by each gateway."""
