"""Evidence drivers: statements of a node's own hardware (attestation.md, evidence.md).

A driver receives only runtime data, so no caller can have arbitrary bytes signed.
"""
