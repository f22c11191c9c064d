"""Kernels of a rank on CUDA, in Triton. On CPU tensors they run in Triton's interpreter, for tests."""
