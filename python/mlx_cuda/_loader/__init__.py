"""Find, check and load the native module for the installed MLX, and describe this machine."""
