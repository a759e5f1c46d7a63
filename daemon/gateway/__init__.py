"""The gateway role: attached volumes, their keys and leases, exported to hosts."""
