"""Periodic asynchrony: generation and training at the same time, every gradient step on-policy (arXiv 2511.18871)."""
