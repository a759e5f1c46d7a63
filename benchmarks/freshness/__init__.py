"""Cost of freshness: its parts in isolation, and device operations per read and write."""
