"""What is worth a write to NVMe, and a trace through the very classes that decide it."""
