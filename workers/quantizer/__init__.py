"""Quantize a checkpoint: from 16 or 32 bits into a folder of compressed-tensors, shard by shard."""
