"""Recipes that bring code: an installed package carries them inside itself, a checkout has them at the top."""

from __future__ import annotations

from pathlib import Path

if not (Path(__file__).parent / "sort_digits").is_dir():
    __path__.append(str(Path(__file__).parents[2] / "recipes"))
