"""Linear attention: a state of constant size instead of keys and values."""
