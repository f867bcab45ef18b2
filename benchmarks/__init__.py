"""Speed as ratios of medians in one run on pinned cores. Each module prints one JSON line."""
