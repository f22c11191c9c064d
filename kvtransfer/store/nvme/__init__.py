"""The NVMe tier: a log of segment files."""
