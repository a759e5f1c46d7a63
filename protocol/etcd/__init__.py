"""The part of the etcd version 3 API that a broker calls."""
