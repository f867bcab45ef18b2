"""Generation: the vLLM engine, the server around it, and the trainer's producer thread."""
