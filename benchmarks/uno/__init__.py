"""Uno's evaluation in virtual time: our controllers and their rivals in one network."""
