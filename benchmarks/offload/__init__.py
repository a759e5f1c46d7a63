"""Sectors sealed by accelerators compared with those that the processor seals."""
