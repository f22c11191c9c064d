"""The command line `tandem`: commands, and the rendering of their results."""
