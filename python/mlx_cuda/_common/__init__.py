"""What every operation needs before anything else: arrays and errors."""
