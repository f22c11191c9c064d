"""Mixtures of experts: feed-forwards of which a router chooses some for each token."""
