"""Settings under `gateway.http:` of the cluster's file: the HTTP port of each gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class HttpConfig(BaseModel):
    """Configures the HTTP port of each gateway, which speaks the APIs of OpenAI and Anthropic."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Where clients are answered over HTTP, on `gateway.host`; 0: a free one; None: nowhere. As for the
    # console, a free one where another `gateway.port` is set and this is not.
    port: int | None = Field(default=8784, ge=0, le=65535)
    # The largest body of a request; a longer one is refused before it is read. `auto`: what the model's
    # context has use for, as JSON, at most half of `admission.max_caller_reading_mb`.
    max_body_bytes: Annotated[int, Field(ge=1 << 10)] | Literal["auto"] = "auto"
    # The longest header of a request. Larger ones end the connection.
    max_header_bytes: int = Field(default=16 << 10, ge=1 << 10)
    # How long the body of a request may take to arrive.
    body_timeout_s: float = Field(default=30.0, gt=0)
    # How long a connection may be without a complete request: when it is new, and between two requests.
    idle_timeout_s: float = Field(default=60.0, gt=0)
    # How long a client may take none of the output that waits for it.
    write_timeout_s: float = Field(default=60.0, gt=0)
    # Prompts and inputs in one request.
    max_inputs: int = Field(default=256, ge=1)
