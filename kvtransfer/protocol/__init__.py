"""The landing protocol, without input or output: sender, receiver, fence, gate."""
