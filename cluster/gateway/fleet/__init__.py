"""The gateways of an application among each other: queries and placements. No Ray, no torch."""
