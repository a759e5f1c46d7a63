"""What sessions cost and reach, beside TCP, TLS and QUIC."""
