"""A finished wheel on this machine: loaded with stub libraries, or installed in a fresh environment and tested."""
