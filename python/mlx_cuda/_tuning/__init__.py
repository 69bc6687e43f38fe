"""Tuning on this GPU: dispatch thresholds, and cuBLASLt algorithms of GEMMs."""
