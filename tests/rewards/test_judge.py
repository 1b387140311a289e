"""The LLM judge, against a server that speaks the OpenAI protocol: marks, retries, deadlines."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gkd.rewards.completion import Completion
from gkd.rewards.judge import Judge

COMPLETION = Completion("2 + 2 =", "it is {answer}", "4", 5, 10, False)


class Endpoint(ThreadingHTTPServer):
    """Answers with what the test says: ``says`` for each request in turn, a number being an HTTP error."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.says: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.delay_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append({**body, "key": self.headers["authorization"]})
        reply = self.server.says.pop(0)
        time.sleep(self.server.delay_s)
        self.send_response(reply if isinstance(reply, int) else 200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        self.wfile.write(b"{}" if isinstance(reply, int) else json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(30)


def judge_at(endpoint: Endpoint, **settings: Any) -> Judge:
    return Judge(Judge.Config(url=endpoint.url, model="m", **settings))


def test_the_first_number_is_the_mark(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    endpoint.says = ["I would say 7.5 of 10"]
    judge = judge_at(endpoint, api_key_env="JUDGE_KEY", prompt="{prompt}|{response}|{answer}")
    assert judge(COMPLETION) == 0.75
    (request,) = endpoint.requests
    assert request["messages"] == [{"role": "user", "content": "2 + 2 =|it is {answer}|4"}]  # nothing filled in twice
    assert (request["model"], request["temperature"], request["key"]) == ("m", 0.0, "Bearer secret")


def test_a_failed_attempt_is_tried_again(endpoint: Endpoint) -> None:
    endpoint.says = [500, "3"]
    assert judge_at(endpoint)(COMPLETION) == pytest.approx(0.3)
    assert len(endpoint.requests) == 2


def test_no_answer_in_time_is_said(endpoint: Endpoint) -> None:
    endpoint.says, endpoint.delay_s = ["3", "3"], 1.0
    judge = judge_at(endpoint, timeout_s=0.2, retries=1)
    with pytest.raises(RuntimeError, match=r"http://127.*: APITimeoutError"):
        judge(COMPLETION)


def test_an_answer_without_a_number_is_no_mark(endpoint: Endpoint) -> None:
    endpoint.says = ["excellent"]
    with pytest.raises(ValueError, match="'excellent'"):
        judge_at(endpoint)(COMPLETION)
