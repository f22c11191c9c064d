"""The service: configuration, gateway, pools on Ray Serve, roster, command line."""
