"""The simulator: a cluster in virtual time, of the code that serves. What it models is how long steps and
transfers take."""
