"""The wheel factory: everything CI does, as commands that also run on a laptop (``python -m ci --help``)."""
