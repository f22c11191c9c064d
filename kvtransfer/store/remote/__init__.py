"""Records of other nodes."""
