"""Devices: a target's directory or a third-party volume, as brokers know it (devices.md)."""
