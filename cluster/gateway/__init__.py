"""The gRPC front: checks requests, walks each through the pools, streams its tokens. No Ray, no torch."""
