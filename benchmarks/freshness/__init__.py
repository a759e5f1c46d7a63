"""What freshness costs: its pieces by themselves, and device operations a write."""
