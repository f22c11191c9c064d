"""What changes a running application: a new configuration, a share of the traffic."""
