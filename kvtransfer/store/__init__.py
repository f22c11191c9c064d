"""The tiered store: finished KV in host memory and on NVMe, found by every node of the cluster."""
