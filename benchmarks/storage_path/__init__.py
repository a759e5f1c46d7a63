"""Benchmark of the storage data path alone: the engine's threads, without daemons."""
