"""Evidence: statements of hardware or a key about a node, and their verification.

One module per kind of evidence. Each parses untrusted bytes, checks signatures, chains and binding,
and returns `Claims`. Whether the claims are sufficient is decided by the policy (RFC 9334: evidence
→ claims here, claims → attestation result in `sealane.crypto.attestation`). No I/O.
"""
