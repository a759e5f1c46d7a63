"""Attestation (RFC 9334): challenge → evidence → claims → policy → attestation result.

`runtime_data` is what a node commits to, `challenge` what it answers, `policy` the requirements;
`verifier` combines them. `sealane.crypto.evidence` reads evidence. Pure: the time is an argument of
every call. docs/understand/attestation.md.
"""
