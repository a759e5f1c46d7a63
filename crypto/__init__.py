"""Keys, leases, attestation and certificates: pure computation, no I/O."""
