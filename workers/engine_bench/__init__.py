"""The engine benchmark: a process that drives the model runner without Ray, along with other engines.

`bench` runs the rounds, `driver` is our engine, `peer_process` starts the others as child processes
(`peer_child`), and `roofline` is what the machine allows.
"""
