"""The shape of a model that is there: from its config.json, and of a type that is not known from its weights' files.

Of these the headers alone are read, which takes milliseconds.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from gkd.data.tokenizer import read_json, resolve_model
from gkd.errors import ConfigError
from gkd.planning.shapes import FAMILIES, Experts, Layers, ModelShape, Weight, shape_of

TensorSizes = Mapping[str, tuple[int, ...]]
_LAYER = re.compile(r"(.*?)\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*experts)\.\d+\.(.*)")
# Parts of a model that its language model lacks: what it sees and hears, and layers that predict further tokens, which
# others have numbered after their own (GLM-4.5).
_OTHER_PARTS = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|multi_modal\w*|mtp)\.")


def read_shape(path: str, setting: str) -> ModelShape:
    """Read the shape of the model in ``path``, a directory or the name of a locally cached model.

    Raises ConfigError, naming ``setting``, where there is no config.json or a number is missing or wrong in it.
    """
    try:
        directory = Path(resolve_model(path, setting))
        config = read_json(directory / "config.json", f"{setting}={path}")
        shape = shape_of(config)
        if shape.kind in (*FAMILIES, "gpt2") or config.get("quantization_config"):  # other weights than it has in use
            return shape
        return count_stored(shape, read_stored(directory))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{setting}={path}: config.json cannot be read: {error}") from None
    except KeyError as error:
        raise ConfigError(f"{setting}={path}: config.json has no {error.args[0]}") from None


def read_stored(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors in the safetensors files of a model, none where not all can be read."""
    from safetensors import SafetensorError, safe_open

    index, stored = directory / "model.safetensors.index.json", dict[str, tuple[int, ...]]()
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values()) if index.exists() else None
        for name in sorted(names or {"model.safetensors"}):
            with safe_open(directory / name, framework="np") as tensors:
                stored |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return {}
    return stored


def count_stored(shape: ModelShape, stored: TensorSizes) -> ModelShape:
    """Return ``shape`` with the weights that are ``stored``; as it is where these are not those of its layers."""
    sizes = {name: size for name, size in stored.items() if not _OTHER_PARTS.search(name)}
    parts = {name: match for name in sizes if (match := _LAYER.fullmatch(name))}
    prefixes = Counter(match[1] for match in parts.values())
    if not prefixes:
        return shape
    prefix = prefixes.most_common(1)[0][0]
    by_layer: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, match in parts.items():
        if match[1] == prefix:
            by_layer.setdefault(int(match[2]), {})[match[3]] = sizes.pop(name)
    by_layer = {number: tensors for number, tensors in by_layer.items() if number < shape.n_layers}
    if len(by_layer) != shape.n_layers:
        return shape
    experts = next((kind.experts for kind in shape.layers if kind.experts), None)
    alike = Counter(tuple(_list_weights(tensors, experts)) for tensors in by_layer.values())
    layers = tuple(Layers(count, weights, *_find_width(shape, weights)) for weights, count in alike.items())
    head = {"lm_head.weight"} if shape.tied else set[str]()
    root = tuple(_list_weights({name: size for name, size in sizes.items() if name not in head}, None))
    note = shape.note.replace("counted as", "its weights are counted as its files have them, all else as of")
    return replace(shape, layers=layers, root=root, note=note)


def _list_weights(tensors: TensorSizes, experts: Experts | None) -> Iterable[Weight]:
    """List weights in the order of their names, those of all experts that are alike as one."""
    merged: dict[str, list[tuple[int, ...]]] = {}
    for name, size in sorted(tensors.items()):
        match = _EXPERT.fullmatch(name)
        merged.setdefault(f"{match[1]}.{match[2]}" if match else name, []).append(size)
    for name, sizes in merged.items():
        of_experts = experts is not None and "experts" in name and "shared" not in name
        share = experts.per_token / experts.count if experts is not None and of_experts else 1.0
        rows = len(sizes) if len(sizes) > 1 else sizes[0][0] if sizes[0] else 1
        linear = len(sizes[0]) == 2 and name.endswith(".weight") and not of_experts
        cols = sum(math.prod(size) for size in sizes) // rows
        yield Weight(name.removesuffix(".weight"), rows, cols, linear, share)


def _find_width(shape: ModelShape, weights: Iterable[Weight]) -> tuple[int, Experts | None]:
    """Return the width of the feed-forward part of a layer with these weights, and its experts."""
    has_experts = any(weight.share < 1 for weight in weights)
    kinds = [kind for kind in shape.layers if (kind.experts is not None) == has_experts] or shape.layers
    return max(kind.width for kind in kinds), kinds[0].experts if has_experts else None
