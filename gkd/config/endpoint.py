"""A model behind an OpenAI-compatible endpoint: what a judge and an evaluated model have in common."""

from __future__ import annotations

import os
import re
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, model_validator

from gkd.config.base import Settings, WaitSeconds

SHORTEST_SECRET = 8
"""Characters; shorter ones, such as a version, occur in any text."""


class OpenAIEndpoint(Settings):
    """Address of a model, and the time that one attempt may take."""

    url: str = Field("", description="base URL, such as http://HOST:8000/v1; a query (?NAME=VALUE) goes with requests")
    model: str = Field("", description="name of the model there")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable with the key, on nodes that call it")
    timeout_s: WaitSeconds = Field(600.0, description="time one attempt has, up to the last byte of its answer")
    retries: int = Field(4, ge=0, description="further attempts after one that failed")

    @model_validator(mode="after")
    def _endpoint_is_named(self) -> Self:
        if not _is_url(self.url) or not self.model:
            raise ValueError("url, such as http://HOST:8000/v1, and model are needed")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):  # its value, perhaps a key, is not printed
            raise ValueError("api_key_env has to be the name of the environment variable that holds the key")
        return self

    @property
    def public_url(self) -> str:
        """The URL without a user and a query, which may hold secrets."""
        return hide_secrets(self.url)

    def key(self) -> str:
        """Return the key in this process' environment; empty where there is none."""
        return os.environ.get(self.api_key_env, "").strip()

    def secrets(self) -> list[str]:
        """Return what no message may have: the key, the URL's user and password, and the values of its query.

        Of these both what stands in the URL and what that means.
        """
        parts = urlsplit(self.url)
        values = [self.key(), parts.username or "", parts.password or ""]
        values += [part.partition("=")[2] for part in parts.query.split("&")]
        values += [value for _, value in parse_qsl(parts.query)]
        return [value for value in values if len(value) >= SHORTEST_SECRET]

    def client_arguments(self) -> dict[str, Any]:
        """Return arguments of OpenAI's clients, with this process' key. Attempts and their time are the caller's."""
        parts = urlsplit(self.url)
        return {
            "base_url": parts._replace(query="", fragment="").geturl(),
            "default_query": dict(parse_qsl(parts.query, keep_blank_values=True)),
            "api_key": self.key() or "none",
            "timeout": None,
            "max_retries": 0,
        }


def hide_secrets(text: str) -> str:
    """Return a URL without a user, a query and a fragment, which may hold secrets; any other text as it is."""
    return re.sub(r"\A(\s*[A-Za-z][\w+.-]*://)(?:[^/?#]*@)?([^?#]*).*", r"\1\2", text, flags=re.DOTALL)


def hide_secrets_within(text: str) -> str:
    """Return a text with every URL in it as :func:`hide_secrets` has it."""
    return re.sub(r"\b[A-Za-z][\w+.-]*://[^\s'\"]+", lambda url: hide_secrets(url[0]), text)


def _is_url(url: str) -> bool:
    """Return whether ``url`` names a host, and a port that there can be or none."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half of an IPv6 address, a port that is none
        return False
