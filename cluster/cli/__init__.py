"""The command line `tandem`: commands, and how they show their results."""
