"""The target role: volumes in a directory or on drives, served to gateways; plain subsystems."""
