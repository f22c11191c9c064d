"""The families of models: a file each, which only declares what makes the family."""
