"""The messages of the tiered store, a file for each connection.

Keys are 16 bytes, offsets and sizes are in bytes, times in seconds. An *offset* names a record in the arena:
the position of its header page, which the payload follows after `HEADER_BYTES`.
"""
