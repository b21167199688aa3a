"""Models of the Hugging Face Hub: pinned to a commit, fetched by ``baton stage-in`` alone, every file checked. Loads no framework.

Only safetensors, configuration and tokenizer are fetched: no pickle and no code. Each file is compared with the digest that the Hub
gives for it in that commit, and these digests stay beside the files, so that whoever reads them later can tell that they are the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

from engines.checkpoint.verify import sha256
from engines.model_folder import ModelFolderError, check_model_folder
from workflow.campaign.plan import RESULTS
from workflow.manifest import write_json

PREFIX = "hf://"
_SOURCE = re.compile(PREFIX + r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*@[0-9a-f]{40}")
FETCHED = RESULTS / ".models"
RECORD = ".fetched.json"
_WANTED = re.compile(r"[^/]+\.(safetensors|json|jinja|txt|model)|README\.md|(LICENSE|NOTICE)[^/]*")
"""In the repository's top folder."""


class FetchFailed(RuntimeError):
    """The Hub was not reached, or does not have what is asked for; the message says which."""


def is_hub(path: str | None) -> bool:
    """Whether a ``model.path`` is the Hub's."""
    return path is not None and path.startswith(PREFIX)


def check_source(source: str) -> None:
    """Refuse what is not pinned.

    Raises:
        ValueError: it is not ``hf://owner/name@commit``.
    """
    if not _SOURCE.fullmatch(source):
        raise ValueError(
            f"path={source!r}: a model of the Hub is hf://owner/name@commit, the commit with all its 40 hex digits"
        )


def hub_folder(source: str) -> Path:
    """Where the fetched copy of ``hf://owner/name@commit`` lies or will lie."""
    return FETCHED / source.removeprefix(PREFIX).replace("/", "--")


def check_fetched(source: str) -> Path:
    """The folder of a model that was fetched; its files are not read.

    Raises:
        ModelFolderError: it was not.
    """
    folder = hub_folder(source)
    if not (folder / RECORD).is_file():
        raise ModelFolderError(
            f"model.path={source!r}: not fetched yet; on a host with internet: baton stage-in CAMPAIGN"
        )
    return folder


def verify_fetched(source: str) -> Path:
    """The folder of a model that was fetched, every byte of it hashed again.

    Raises:
        ModelFolderError: it was not fetched, or a file is missing or altered.
    """
    folder = check_fetched(source)
    recorded = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    for name, digest in recorded["files"].items():
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            raise ModelFolderError(
                f"{folder / name}: missing, or not what was fetched; remove {folder} and run baton stage-in again"
            )
    return folder


def fetch(source: str) -> Path:
    """Fetch ``hf://owner/name@commit`` and check every file; goes on with what an earlier call had begun. Returns the folder.

    Raises:
        FetchFailed: the Hub cannot be reached, knows no such commit, gave another file than it lists, or the disk is too small.
        ModelFolderError: what it has is no complete model in safetensors.
    """
    from huggingface_hub import HfApi  # slow to import, and needed here only
    from huggingface_hub.errors import HTTPError

    repository, _, commit = source.removeprefix(PREFIX).partition("@")
    folder = hub_folder(source)
    partial = folder.with_name(f".{folder.name}.partial")
    api = HfApi()
    try:
        info = api.model_info(repository, revision=commit, files_metadata=True)
        wanted = [file for file in info.siblings or [] if _WANTED.fullmatch(file.rfilename)]
        _check_offer(source, info.sha, wanted)
        for file in wanted:
            api.hf_hub_download(repository, file.rfilename, revision=commit, local_dir=partial)
    except (HTTPError, OSError) as error:
        raise FetchFailed(f"model.path={source!r}: {str(error).strip().splitlines()[0]}") from error
    digests = {file.rfilename: _checked(partial / file.rfilename, file) for file in wanted}
    check_model_folder(partial)
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the client's notes
    write_json(partial / RECORD, {"source": source, "files": digests})
    partial.rename(folder)
    return folder


def _check_offer(source: str, commit: str, wanted: list) -> None:
    """Before the first byte: the right commit, safetensors, and room for them."""
    if not source.endswith(f"@{commit}"):
        raise FetchFailed(f"model.path={source!r}: the Hub answered with commit {commit}")
    if not any(file.rfilename.endswith(".safetensors") for file in wanted):
        raise ModelFolderError(f"model.path={source!r}: that commit has no safetensors in its top folder")
    FETCHED.mkdir(parents=True, exist_ok=True)
    needed, free = sum(file.size or 0 for file in wanted), shutil.disk_usage(FETCHED).free
    if needed > free:
        raise FetchFailed(
            f"model.path={source!r}: {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free in {FETCHED}"
        )


def _checked(path: Path, file) -> str:
    """The file's SHA-256, after comparing it with what the Hub lists: that of large files, or git's own of small ones."""
    found = sha256(path)
    if file.lfs is not None:
        right = found == file.lfs.sha256
    else:
        content = path.read_bytes()
        right = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == file.blob_id
    if not right:
        path.unlink()
        raise FetchFailed(f"{path.name}: not the bytes that the Hub lists for it; run the same command again")
    return found
