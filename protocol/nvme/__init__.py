"""NVMe over Fabrics for the control plane: names, identify data, Connect, admin queue.

No I/O here. The I/O queues and the PDU codec are native.
"""
