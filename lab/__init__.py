"""The link lab: hosts in network namespaces and emulated long links between them (lab.md)."""
