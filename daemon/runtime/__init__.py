"""What every role runs on: gRPC servers, logs, metrics, files, clock, process."""
