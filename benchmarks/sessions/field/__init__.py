"""Sessions of daemons beside TCP and QUIC on links as they are in the field."""
