"""The fabric role: sessions between data centres for the jobs of this machine."""
