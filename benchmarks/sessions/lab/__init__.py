"""Completion times of messages over long links in the lab: sessions against TCP and QUIC."""
