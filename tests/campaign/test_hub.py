"""Models of the Hub: the real client against a small server that answers as the Hub does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from engines.config import ConfigError
from engines.model_folder import ModelFolderError
from tests.support.tiny_model import TINY
from workflow.campaign.code import source_root
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.hub import FetchFailed, check_fetched, fetch, hub_folder, verify_fetched
from workflow.campaign.schema import ModelConfig
from workflow.cli import app
from workflow.stages.convert import convert

COMMIT = hashlib.sha1(b"a commit").hexdigest()
SOURCE = f"hf://owner/tiny@{COMMIT}"
EXTRA = {
    "modeling.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.onnx": b"another format",
}


@dataclass
class Hub:
    """Serves one repository at one commit."""

    files: dict[str, bytes]
    commit: str = COMMIT
    altered: str = ""
    """A file that is given with other bytes than are listed."""
    asked: list[str] = field(default_factory=list)
    """Files that were downloaded."""

    def listing(self) -> dict:
        return {"id": "owner/tiny", "sha": self.commit, "siblings": [self._sibling(n) for n in self.files]}

    def _sibling(self, name: str) -> dict:
        content = self.files[name]
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"rfilename": name, "size": len(content), "blobId": blob}
        if name.endswith(".safetensors"):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 128}
        return entry

    def content(self, name: str) -> bytes:
        return self.files[name][::-1] if name == self.altered else self.files[name]


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            prefix = f"/owner/tiny/resolve/{COMMIT}/"
            if path == f"/api/models/owner/tiny/revision/{COMMIT}":
                content = json.dumps(hub.listing()).encode()
            elif path.startswith(prefix) and (name := path.removeprefix(prefix)) in hub.files:
                content = hub.content(name)
                hub.asked += [name] if body else []
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            """Quiet."""

    return Handler


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model") / "model"
    _, runs = plan_campaign(read_options({"campaign": "drill", "site": "local"}), source_root())
    convert(TINY, folder, seed=0, data=runs[0].config.data)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(model, tmp_path, monkeypatch) -> Iterator[Hub]:
    served = Hub({**model, **EXTRA})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(served))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name, value in (  # what HF_ENDPOINT sets, when the client is imported
        ("ENDPOINT", address),
        ("HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_OFFLINE", False),
    ):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.chdir(tmp_path)
    yield served
    server.shutdown()
    server.server_close()


def test_a_model_is_fetched_once_checked_and_converted_without_the_hub(hub, model, tmp_path):
    words = f"model=local model.path={SOURCE}"
    options = read_options({"campaign": "drill", "site": "local", "set": words})
    with pytest.raises(ConfigError, match="not fetched yet; on a host with internet: baton stage-in"):
        plan_campaign(options, source_root())
    done = CliRunner().invoke(app, ["stage-in", "drill", "--site", "local", "--set", words])
    assert done.exit_code == 0, done.output
    assert "fetched now, as the Hub lists it" in " ".join(done.output.split())
    assert sorted(hub.asked) == sorted(model)  # no code, no pickle, no other format
    again = CliRunner().invoke(app, ["stage-in", "drill", "--site", "local", "--set", words])
    assert "as it was fetched" in " ".join(again.output.split())
    assert sorted(hub.asked) == sorted(model)
    plan, _ = plan_campaign(options, source_root())
    assert len(plan.runs) == 2

    source = convert(ModelConfig(name="hub", path=SOURCE), tmp_path / "converted")["source"]
    assert source["source"] == SOURCE
    assert (tmp_path / "converted/model.safetensors").read_bytes() == model["model.safetensors"]
    (hub_folder(SOURCE) / "config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="not what was fetched"):
        convert(ModelConfig(name="hub", path=SOURCE), tmp_path / "converted")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_other_bytes_than_the_hub_lists_are_refused_and_fetched_again(hub, name):
    hub.altered = name
    with pytest.raises(FetchFailed, match=f"{name}: not the bytes that the Hub lists"):
        fetch(SOURCE)
    with pytest.raises(ModelFolderError, match="not fetched yet"):
        check_fetched(SOURCE)
    hub.altered, hub.asked = "", []
    fetch(SOURCE)
    assert hub.asked == [name]
    assert verify_fetched(SOURCE) == hub_folder(SOURCE)


def test_what_the_hub_does_not_have_is_named(hub, monkeypatch):
    with pytest.raises(FetchFailed, match=r"owner/other@.*404"):
        fetch(f"hf://owner/other@{COMMIT}")
    hub.commit = "f" * 40
    with pytest.raises(FetchFailed, match="answered with commit ffff"):
        fetch(SOURCE)
    hub.commit, hub.files = COMMIT, EXTRA
    with pytest.raises(ModelFolderError, match="no safetensors"):
        fetch(SOURCE)
    assert not hub.asked
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FetchFailed, match="offline"):
        fetch(SOURCE)


@pytest.mark.parametrize(
    "source", ["hf://owner/tiny", "hf://owner/tiny@main", f"hf://tiny@{COMMIT}", f"hf://../x@{COMMIT}"]
)
def test_a_source_is_pinned(source):
    with pytest.raises(ValueError, match="40 hex digits"):
        ModelConfig(name="hub", path=source)
