"""Model files: which tensors they hold, where, and under which digests."""
