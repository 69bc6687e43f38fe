"""Linear attention: a state of constant size in the place of keys and values."""
