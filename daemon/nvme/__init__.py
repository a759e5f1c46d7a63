"""NVMe/TCP controllers up to the I/O queue: listener, Connect, admin queue, discovery."""
