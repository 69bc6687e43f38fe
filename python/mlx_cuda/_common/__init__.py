"""The basis of all operations: arrays and errors."""
