"""NVMe over Fabrics as the control side needs it: names, identify data, Connect, admin queue.

No input or output here. The I/O queues and the PDU codec are native.
"""
