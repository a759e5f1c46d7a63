"""The experiments of SDR-RDMA (arXiv:2505.05366) in virtual time, the model beside the stack."""
