"""Shared by target and gateway: a volume's descriptor, events, jobs and store status."""
