"""Where brokers keep their state: one contract, `sqlite` and `etcd` behind it (decision 20)."""
