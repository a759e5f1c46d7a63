"""The part of the API of etcd version 3 that a broker calls."""
