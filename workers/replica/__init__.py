"""The engine core process of a replica: requests, step loop, rank group and the links of gateways. No
torch."""
