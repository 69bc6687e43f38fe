"""The workflows run on this machine, step by step, with the real tools; only GitHub's own actions have stand-ins."""
