"""A finished wheel on this machine: loaded with stand-ins, or installed in a fresh environment and tested."""
