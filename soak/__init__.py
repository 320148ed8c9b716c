"""Blows at random moments: what a host and its workers make of them."""
