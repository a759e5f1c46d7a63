"""Benchmark of the storage data path alone: engine threads without daemons."""
