"""Decode steps that are captured once and launched for each token: the captured graph, the state of the model at capture, and its
memory."""
