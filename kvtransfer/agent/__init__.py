"""The transfer agent of a rank: writer connections, lanes, quality of service."""
