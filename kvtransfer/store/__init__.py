"""The tiered store: finished KV kept in host memory and on NVMe, found in the whole cluster."""
