"""A model behind an OpenAI-compatible endpoint: what a judge and an evaluated model have in common."""

from __future__ import annotations

import os
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from gkd.config.base import Settings, WaitSeconds


class OpenAIEndpoint(Settings):
    """Address of a model, and the time that one attempt may take."""

    url: str = Field("", description="base URL, such as http://HOST:8000/v1")
    model: str = Field("", description="name of the model there")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable with the key, on nodes that call it")
    timeout_s: WaitSeconds = Field(600.0, description="time one attempt has, up to the last byte of its answer")
    retries: int = Field(2, ge=0, description="further attempts after one that failed")

    @model_validator(mode="after")
    def _endpoint_is_named(self) -> Self:
        if not _is_url(self.url) or not self.model:
            raise ValueError("url, such as http://HOST:8000/v1, and model are needed")
        return self

    def client_arguments(self) -> dict[str, Any]:
        """Return arguments of OpenAI's clients, with this process' key. Attempts and their time are the caller's."""
        return {
            "base_url": self.url,
            "api_key": os.environ.get(self.api_key_env, "none"),
            "timeout": None,
            "max_retries": 0,
        }


def _is_url(url: str) -> bool:
    """Return whether ``url`` names a host, and a port that there can be or none."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half of an IPv6 address, a port that is none
        return False
