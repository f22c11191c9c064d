"""What `tandem` does: the commands behind the command line, and how they show their results."""
