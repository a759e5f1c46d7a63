"""Communication between machines: sessions across data centres, and NVMe/TCP connections."""
