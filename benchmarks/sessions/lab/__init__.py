"""Completion times of messages over long links: sessions beside TCP and QUIC in the lab."""
