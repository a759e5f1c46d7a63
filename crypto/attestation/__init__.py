"""Attestation (RFC 9334): challenge → evidence → claims → policy → attestation result.

`runtime_data` is what a node commits to, `challenge` what it answers, `policy` what is wanted of
it, `verifier` puts them together. Evidence itself is read by `sealane.crypto.evidence`. Pure: time
comes in with every call. docs/understand/attestation.md.
"""
