"""Asynchronous control around the native storage engine: listener, target, gateway, initiator."""
