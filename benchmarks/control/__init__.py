"""Control-plane benchmarks: the rates that a broker sustains."""
