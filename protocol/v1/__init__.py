"""Generated from the .proto files beside this one by `make proto`: gRPC package sealane.v1."""
