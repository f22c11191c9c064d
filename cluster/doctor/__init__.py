"""The checks of `tandem doctor`: misconfigurations of a machine, and problems of a running cluster."""
