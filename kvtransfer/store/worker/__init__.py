"""The rank's side of the store: it maps the arena and copies blocks."""
