"""Finding, proving and loading the native module that fits the installed MLX, and what is known of this machine."""
