"""What the tests of data/*.py share."""

import importlib.util
import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "data"))


def has(*packages):
    return all(importlib.util.find_spec(package) is not None for package in packages)


HAS_ZSTD = has("zstandard") or shutil.which("zstd") is not None
