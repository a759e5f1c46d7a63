"""Stores of brokers' state: one contract, implemented by `sqlite` and `etcd` (decision 20)."""
