"""KV blocks in memory: keys, layout, pools and checksums."""
