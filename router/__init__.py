"""Choose a prefill and a decode replica for each request, from block keys and load reports alone."""
