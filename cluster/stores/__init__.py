"""The stores of the nodes as the service runs and asks them."""
