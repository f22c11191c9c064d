"""Messages that enter or leave a replica, or pass between its engine core and its ranks. Token ids travel as
uint32 little-endian bytes; no tensors."""
