"""The scheduler: what each step computes, and in which KV blocks. No torch, no input or output."""
