"""A rank's end of the store: it maps the arena and copies."""
