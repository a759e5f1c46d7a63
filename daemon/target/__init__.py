"""The target role: serves volumes in a directory or on drives to gateways; plain subsystems."""
