"""A pretence of a wandb server on localhost: it remembers each run's config, summary and history, and nothing else.

It stands in for the real one, which cannot be reached by tests: what it shows is what this package and the wandb client
send and resume, not what wandb's pages make of it.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer(ThreadingHTTPServer):
    """`mode`: `works`, `refuses` (every request is unauthorised) or `hangs` (connects and never answers)."""

    daemon_threads = True

    def __init__(self, mode: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode = mode
        self.runs: dict[str, dict[str, Any]] = {}  # id -> what was last upserted, "history" (lines), "summary"

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def history(self, run_id: str) -> list[dict[str, Any]]:
        """The rows of one run, without wandb's own keys."""
        rows = [json.loads(line) for line in self.runs[run_id]["history"]]
        return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error."""


@contextmanager
def serving(mode: str = "works") -> Iterator[WandbServer]:
    server = WandbServer(mode)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, *args: Any) -> None: ...

    def _answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _read(self) -> Any:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def do_PUT(self) -> None:  # an uploaded file
        self._read()
        self._answer({})

    def do_POST(self) -> None:
        body = self._read()
        if self.server.mode == "hangs":
            time.sleep(60)
        elif self.server.mode == "refuses":
            self._answer({"errors": [{"message": "who are you"}]}, 401)
        elif "/file_stream" in self.path:
            self._stream(self.path.split("/")[4], json.loads(body))
        else:
            request = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
            answer = getattr(self, f"_{operation[1]}", None) if operation else None
            refusal = {"data": None, "errors": [{"message": "not in this pretence"}]}
            self._answer({"data": answer(request.get("variables") or {})} if answer else refusal)

    def _stream(self, run_id: str, message: dict[str, Any]) -> None:
        run = self.server.runs[run_id]
        for name, part in (message.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                run["history"][part["offset"] : part["offset"] + len(part["content"])] = part["content"]
            elif name == "wandb-summary.json":
                run["summary"] = part["content"][-1]
        if message.get("complete"):
            run["exitcode"] = message.get("exitcode")
        self._answer({"exitcode": None, "limits": {}})

    def _UpsertBucket(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        run = self.server.runs.setdefault(variables["name"], {"history": [], "summary": "{}"})
        is_new = "config" not in run
        run |= {key: value for key, value in variables.items() if value is not None}
        project = {"id": "p", "name": "posbench", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": variables["name"], "name": variables["name"], "displayName": run.get("displayName")}
        bucket |= {"description": None, "sweepName": None, "config": run["config"], "project": project}
        return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}

    def _RunResumeStatus(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        run = self.server.runs.get(variables["name"])
        if run is None:
            return {"model": None}
        bucket = {"id": variables["name"], "name": variables["name"], "displayName": run["displayName"]}
        bucket |= {"tags": run.get("tags") or [], "notes": run.get("notes") or ""}
        bucket |= {"sweepName": None, "groupName": run["groupName"], "jobType": "train"}
        bucket |= {"config": run["config"], "summaryMetrics": run["summary"], "wandbConfig": '{"t": 1}'}
        bucket |= {"historyLineCount": len(run["history"]), "historyTail": json.dumps(run["history"][-1:])}
        bucket |= {"eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]"}
        return {"model": {"id": "p", "name": "posbench", "entity": {"id": "e", "name": "me"}, "bucket": bucket}}

    def _Viewer(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        viewer = {"id": "v", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer}

    def _CreateRunFiles(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        files = [{"name": name, "uploadUrl": f"{self.server.address}/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
