"""The engine benchmark: a process that drives the model runner without Ray, beside other engines.

`bench` runs the rounds, `driver` is our engine, `peers` starts the others as child processes (`peer_child`),
and `limits` is what the machine allows.
"""
