"""Between machines: sessions across datacenters, and NVMe/TCP connections."""
