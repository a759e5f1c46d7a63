"""The broker role: verifier, key broker, lease authority, volume registry."""
