"""The service: API, gateway, roster, scaling, the Ray application, the command line."""
