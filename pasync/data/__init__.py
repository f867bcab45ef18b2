"""From rows of a data set to prompts, and from finished groups to micro-batches."""
