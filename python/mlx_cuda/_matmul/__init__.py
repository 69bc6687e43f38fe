"""Matrix products: their rules, and what calls each kernel."""
