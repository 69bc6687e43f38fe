"""Decode steps as CUDA graphs: the captured graph, the model's state at capture, and the memory of its caches."""
