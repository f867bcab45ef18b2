"""What a run shows: console lines and metrics."""
