"""Keys, leases, attestation and certificates: pure computation, no input or output."""
