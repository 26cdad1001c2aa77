"""The snippet of docs/service.md runs as it stands, on a service that the page's command starts."""

import re
import shlex
import socket

import pytest
from snippets import ROOT, run_snippets


@pytest.mark.slow
def test_the_snippet_runs(servers, tmp_path):
    page = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```bash\npython -m tfopt\.pipelines\.serve (.*)\n```", page)
    try:
        socket.create_server(("127.0.0.1", 5050)).close()
    except OSError:
        pytest.skip("port 5050, which the page names, is taken on this machine")
    servers.serve(*shlex.split(command))
    printed = run_snippets("service.md", tmp_path)
    assert "2 workers there" in printed
    assert "Epoch 2/2" in printed
