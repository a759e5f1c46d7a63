"""NVMe/TCP controllers except I/O queues: listener, Connect, admin queue, discovery."""
