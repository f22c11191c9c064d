"""Transfer KV blocks between ranks: keys, checksums, layout, landings, transports. Knows no models."""
