"""Evidence: what hardware or a key says of a node, and what can be believed of it.

One module per kind of evidence. Each parses untrusted bytes, checks signatures, chains and binding
and returns `Claims`; whether the claims are good enough is the policy's to say (RFC 9334: evidence
→ claims here, claims → attestation result in `sealane.crypto.attestation`). No input or output.
"""
