"""KV blocks in memory: keys, layout, pools, checksums."""
