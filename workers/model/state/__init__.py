"""Layers that keep a recurrent state of constant size in place of keys and values."""
