"""The fabric role: sessions between datacenters for the jobs of this machine."""
