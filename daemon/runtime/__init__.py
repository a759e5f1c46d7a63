"""Shared by all roles: gRPC servers, logs, metrics, files, clock, process."""
