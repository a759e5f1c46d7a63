"""Evidence drivers: what a node's own hardware says of it (attestation.md, evidence.md).

A driver is handed the runtime data and nothing else: nobody can have it speak for bytes of theirs.
"""
