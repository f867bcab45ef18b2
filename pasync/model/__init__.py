"""Hugging Face models: attention over packed groups, chunked log-probs, and small ones made here."""
