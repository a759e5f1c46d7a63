"""Near and far traffic over real sockets in the lab: sessions by controller, TCP and QUIC."""
