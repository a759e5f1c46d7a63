"""The section `[traces]` of the configuration."""

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from sealane.daemon.runtime.config_types import AbsolutePath, CollectorUrl, Section


class TracesConfig(Section):
    """The OpenTelemetry collector that gets a span of each call, over OTLP."""

    endpoint: CollectorUrl
    ca_file: AbsolutePath | None = None
    sample_percent: Annotated[float, Field(ge=0, le=100)] = 100.0

    @property
    def is_encrypted(self) -> bool:
        """True for https; http is for a collector on this machine."""
        return self.endpoint.startswith("https:")

    @field_validator("ca_file")
    @classmethod
    def _check_ca_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("endpoint", "").startswith("http:"):
            raise ValueError("nothing, because the endpoint is without TLS (http:)")
        return value
