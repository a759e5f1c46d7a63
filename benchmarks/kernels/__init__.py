"""Sealing and erasure coding compared with other libraries, one core."""
