"""NVMe/TCP connections of the control side: the initiator, and the PDU stream of both sides."""
