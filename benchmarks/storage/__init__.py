"""Storage benchmark: plain and secure volumes, or any NVMe/TCP target."""
