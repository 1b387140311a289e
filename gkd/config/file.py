"""Configuration files, without Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from gkd.errors import ConfigError

# An installed package carries conf inside itself; a checkout has it at the top.
_INSIDE, _TOP = Path(__file__).parents[1] / "conf", Path(__file__).parents[2] / "conf"
CONF_DIR = _INSIDE if _INSIDE.is_dir() else _TOP


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read what a configuration file says, unchecked. Raises ConfigError for a file that holds no names and values."""
    try:
        given = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path} cannot be read: it is nested too deep, or holds itself") from None
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path} is no configuration: names and values are expected")
    return {str(name): value for name, value in given.items()}
