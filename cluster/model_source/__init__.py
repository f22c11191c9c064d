"""Models by name or URL: which files they are, and a cache of them that the processes of a host share."""
