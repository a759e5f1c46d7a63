"""Sealing and erasure coding beside other libraries, one core."""
