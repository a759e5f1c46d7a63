"""How sessions, jobs and messages share a fabric."""
