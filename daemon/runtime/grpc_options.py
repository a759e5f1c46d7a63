"""What all gRPC channels of the daemon have in common."""

from typing import Final

NO_PROXY: Final = ("grpc.enable_http_proxy", 0)
"""A proxy would be another machine."""
