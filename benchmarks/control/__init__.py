"""Figures of the control plane: what a broker can do in a second."""
