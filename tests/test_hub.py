"""The model hub's answers, from a small server that speaks its protocol: each one is told apart in one line."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from conftest import refused

COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """owner/gated, owner/missing, and owner/huge with a weight file of 10**15 bytes."""

    def do_GET(self):
        if "gated" in self.path:
            self.answer(403, {"X-Error-Code": "GatedRepo"})
        elif "huge" not in self.path:
            self.answer(404, {"X-Error-Code": "RepoNotFound"})
        else:
            files = [{"rfilename": "config.json", "size": 2}, {"rfilename": "model.safetensors", "size": 10**15}]
            self.answer(200, {}, {"id": "owner/huge", "sha": COMMIT, "siblings": files})

    def answer(self, code, headers, body=None):
        data = json.dumps(body or {}).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def hub():
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def nobody():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize(
    ("name", "words"), [("gated", "gated. Accept its terms"), ("missing", "the hub has no such model, or it is private")]
)
def test_hub_says_no(name, words, hub, tmp_path):
    message = refused("--model", f"owner/{name}", cwd=tmp_path, HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
    assert f"--model owner/{name}: {words}" in message and "--model /path/to/model" in message


def test_hub_is_out_of_reach(nobody, tmp_path):
    message = refused("--model", "owner/model", cwd=tmp_path, HF_ENDPOINT=nobody, HF_HOME=str(tmp_path))
    assert f"the hub at {nobody} cannot be reached" in message and "--model /path/to/model" in message


def test_disk_is_too_small(hub, tmp_path):
    message = refused("--model", "owner/huge", cwd=tmp_path, HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
    assert "1000000.0 GB to download" in message and "--model /path/to/model" in message
