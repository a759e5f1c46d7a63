"""The daemon: composition root, gRPC servicers, state, command line."""
