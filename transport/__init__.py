"""Sessions between datacenters: the completion-time model and the establishment transcript."""
