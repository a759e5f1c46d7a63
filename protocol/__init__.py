"""Protocol definitions: the control API, its errors on the wire, NVMe structures."""
