"""The experiments of SDR-RDMA (arXiv:2505.05366) in virtual time, stack against model."""
