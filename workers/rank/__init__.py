"""The rank process: model runner, sampler, collectives, probe."""
