"""Ranks and the sharded optimizer."""
