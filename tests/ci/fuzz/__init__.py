"""``nox -s fuzz-audit``: mutants of a finished wheel, and what the audit, ld.so, pip and uv make of each."""
