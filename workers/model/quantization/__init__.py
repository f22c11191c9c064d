"""Weights of fewer than 16 bits: their form in memory, and the formats that they are read from."""
