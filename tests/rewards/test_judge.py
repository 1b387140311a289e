"""The LLM judge, against a server that speaks the OpenAI protocol: marks, retries, deadlines."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gkd.config import load
from gkd.errors import ConfigError, QuestionRefused, RunFailed
from gkd.rewards.completion import Completion
from gkd.rewards.judge import Judge
from gkd.rewards.process import _evaluate_async
from tests.error_text import contains_in_order

COMPLETION = Completion("2 + 2 =", "it is {answer}", "4", 5, 10, False)


class Endpoint(ThreadingHTTPServer):
    """Answers with what the test says: ``says`` for each request in turn, a number being an HTTP error, bytes a body.

    ``headers`` go with all, and between the bytes of an answer it waits ``drip_s``. A request with a parameter of
    ``refuses`` gets none of them, but the error that OpenAI has for it.
    """

    daemon_threads = True
    request_queue_size = 128  # of connections that come together

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.says: list[Any] = []
        self.refuses: tuple[str, ...] = ()
        self.names: Any = None  # in place of the parameter's name
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: dict[str, str] = {}
        self.delay_s = self.drip_s = 0.0
        self.under_way = self.most_at_once = 0

    def handle_error(self, *_: Any) -> None:
        """Say nothing of a client that went away."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append({**body, "key": self.headers["authorization"]})
        self.server.paths.append(self.path)
        refused = [name for name in self.server.refuses if name in body]
        reply = 400 if refused else self.server.says.pop(0)
        self.server.under_way += 1
        self.server.most_at_once = max(self.server.most_at_once, self.server.under_way)
        time.sleep(self.server.delay_s)
        self.server.under_way -= 1
        if isinstance(reply, tuple):
            status, reply = reply
            self.send_response(status)
        else:
            self.send_response(reply if isinstance(reply, int) else 200)
        self.send_header("content-type", "application/json")
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if isinstance(reply, bytes):
            self.wfile.write(reply)
            return
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        error = (
            {"error": {"message": f"Unsupported: {refused[0]}", "param": self.server.names or refused[0]}}
            if refused
            else {}
        )
        body_bytes = json.dumps(error if isinstance(reply, int) else answer).encode()
        for byte in body_bytes if self.server.drip_s else ():
            self.wfile.write(bytes([byte]))
            time.sleep(self.server.drip_s)
        self.wfile.write(b"" if self.server.drip_s else body_bytes)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serve() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(30)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serve() as server:
        yield server


def judged(endpoint: Endpoint, completion: Completion = COMPLETION, **settings: Any) -> float:
    judge = Judge(Judge.Config(url=endpoint.url, model="m", **settings))
    return asyncio.run(judge(completion))


def test_the_first_number_is_the_mark(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    endpoint.says = ["I would say 7.5 of 10"]
    assert judged(endpoint, api_key_env="JUDGE_KEY", prompt="{prompt}|{response}|{answer}") == 0.75
    (request,) = endpoint.requests
    assert request["messages"] == [{"role": "user", "content": "2 + 2 =|it is {answer}|4"}]  # nothing filled in twice
    assert (request["model"], request["temperature"], request["key"]) == ("m", 0.0, "Bearer secret")


def test_a_failed_attempt_is_tried_again(endpoint: Endpoint) -> None:
    endpoint.says = [500, "3"]
    assert judged(endpoint) == pytest.approx(0.3)
    assert len(endpoint.requests) == 2


def test_no_answer_in_time_is_said(endpoint: Endpoint) -> None:
    """Also where bytes come all the time."""
    endpoint.says, endpoint.delay_s = ["3", "3"], 1.0
    with pytest.raises(RunFailed, match=r"http://127.* 0\.2 s \(reward\.judge\.timeout_s\) \(attempt 2 of 2\)"):
        judged(endpoint, timeout_s=0.2, retries=1)
    endpoint.says, endpoint.delay_s, endpoint.drip_s = ["3"], 0.0, 0.1
    with pytest.raises(RunFailed, match=r"\(attempt 1 of 1\)"):
        judged(endpoint, timeout_s=0.5, retries=0)


def test_what_is_no_completion_is_tried_again(endpoint: Endpoint) -> None:
    """As gateways answer with 200 while a model behind them is busy."""
    busy = b'{"error": {"message": "overloaded"}}'
    endpoint.says = [busy, "3"]
    assert judged(endpoint) == pytest.approx(0.3)
    endpoint.says = [busy, busy]
    with pytest.raises(RunFailed, match=r"reward\.judge: http://127.*overloaded.* \(attempt 2 of 2\)"):
        judged(endpoint)


def test_a_pause_that_is_asked_for_is_made_where_there_is_time(endpoint: Endpoint) -> None:
    endpoint.says, endpoint.headers = [429, "3"], {"retry-after": "0"}
    assert judged(endpoint) == pytest.approx(0.3)
    endpoint.says, endpoint.headers = [429, "3"], {"retry-after": "inf"}  # what is no time asks for no pause
    assert judged(endpoint) == pytest.approx(0.3)
    endpoint.says, endpoint.headers = [429], {"retry-after": "30"}
    with pytest.raises(RunFailed, match=r"RateLimitError.* 30 s, .*reward\.judge\.timeout_s=4 .* 4 s"):
        judged(endpoint)
    endpoint.says, endpoint.headers = [429], {"retry-after": "Wed, 21 Oct 2065 07:28:00 GMT"}
    with pytest.raises(RunFailed, match=r"RateLimitError.* \d{9,} s, "):
        judged(endpoint)
    # One that would leave the next attempt less than its time is not made.
    endpoint.says, endpoint.headers = [429], {"retry-after": "5"}
    with pytest.raises(RunFailed, match=r"\(attempt 1 of 2\).* 5 s, .* 4 s"):
        judged(endpoint)


def test_an_endpoint_that_has_answered_has_time_to_start_again(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that never has is given up soon: its URL may be wrong."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    judge = Judge(Judge.Config(url=endpoint.url, model="m", timeout_s=600.0, retries=4))
    endpoint.says = [503, 503, 503, 503, "3", 503, 503, 503, 503, "4"]

    async def ask_twice() -> list[float]:
        return [await judge(COMPLETION) for _ in range(2)]

    assert asyncio.run(ask_twice()) == [0.3, 0.4]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 0.5, 4.0, 32.0, 60.0]


def test_a_judge_that_has_no_time_for_all_attempts_says_what_the_last_was(endpoint: Endpoint) -> None:
    endpoint.says, endpoint.headers = ["3", 503, 503], {"retry-after": "100"}
    judge = Judge(Judge.Config(url=endpoint.url, model="m", timeout_s=200.0))

    async def ask_twice() -> Any:
        await judge(COMPLETION)  # its client takes longer to make than to ask
        return await _evaluate_async(judge, [COMPLETION], 0.5)

    (answer,) = asyncio.run(ask_twice())
    assert isinstance(answer, str)
    assert contains_in_order(answer, "(reward.timeout_s)", "InternalServerError", "(attempt 1 of 2)")


def test_one_attempt_has_less_time_than_the_reward() -> None:
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    own: tuple[dict[str, Any], ...] = ({"timeout_s": 4.0}, {"judge": {"timeout_s": 10.0}})
    for settings in own:
        reward: dict[str, Any] = {"functions": ["judge"], "judge": judge} | settings
        reward["judge"] = judge | reward["judge"]
        with pytest.raises(ConfigError, match=r"^reward\.judge\.timeout_s=\d+ .* reward\.timeout_s="):
            load({"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "reward": reward})


def test_a_missing_key_is_named(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    endpoint.says = [401, 401, 401]
    with pytest.raises(RunFailed, match=r"AuthenticationError.* JUDGE_KEY \(reward\.judge\.api_key_env\) is not"):
        judged(endpoint, api_key_env="JUDGE_KEY")
    with pytest.raises(RunFailed, match=r"(?!.*gsk_12)AuthenticationError.* \(reward\.judge\.api_key_env\) is not"):
        judged(endpoint, api_key_env="gsk_1234abcd")  # a key that could be a name
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with pytest.raises(RunFailed, match=r"AuthenticationError(?!.*JUDGE_KEY)"):
        judged(endpoint, api_key_env="JUDGE_KEY")


def test_a_key_in_place_of_a_variable_is_refused_and_not_shown() -> None:
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "sk-1234"}
    with pytest.raises(ConfigError, match=r"^reward\.judge: api_key_env") as refused:
        load({"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "reward": {"functions": ["judge"], "judge": judge}})
    assert "1234" not in str(refused.value)


def test_a_query_of_the_url_goes_with_requests_and_no_secret_is_shown(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-model")
    body = b'{"error": "key-of-the-model, key-of-the-query and key-of-the-user"}'
    endpoint.says = ["3", body]
    url = endpoint.url.replace("http://", "http://me:key-of-the-user@") + "?v=1&api-key=key-of-the-query"
    judge = Judge(Judge.Config(url=url, model="m", retries=0))

    async def score_two() -> None:
        assert await judge(COMPLETION) == pytest.approx(0.3)
        await judge(COMPLETION)

    with pytest.raises(RunFailed, match=r"\*\*\*, \*\*\* and \*\*\*") as failed:
        asyncio.run(score_two())
    assert endpoint.paths == ["/v1/chat/completions?v=1&api-key=key-of-the-query"] * 2
    assert endpoint.url in str(failed.value) and "key-of" not in str(failed.value)


def test_a_secret_is_hidden_as_it_stands_in_the_url_and_where_a_long_answer_is_cut(endpoint: Endpoint) -> None:
    secret = "key%2Fof%3Dthe-query"
    for says in (b'{"error": "' + secret.encode() + b'"}', b"x" * 190 + b" key/of=the-query"):
        endpoint.says = [says]
        with pytest.raises(RunFailed, match=r"\*\*\*") as failed:
            asyncio.run(Judge(Judge.Config(url=f"{endpoint.url}?code={secret}", model="m", retries=0))(COMPLETION))
        assert "key" not in str(failed.value)


def test_what_an_endpoint_says_of_a_failure_is_shown_whatever_form_it_has(endpoint: Endpoint) -> None:
    endpoint.says = [(422, b'{"error": "inputs are too long"}'), (404, b'{"detail": "no model m"}')]
    for reason in ("too long", "no model"):
        with pytest.raises(Exception, match=reason):
            asyncio.run(Judge(Judge.Config(url=endpoint.url, model="m", retries=0))(COMPLETION))


@pytest.mark.parametrize(("answer", "mark"), [(".5", 0.5), ("Score: -.5", -0.5), ("I say...7", 7.0), ("Score.7", 7.0)])
def test_a_mark_may_begin_with_a_dot(endpoint: Endpoint, answer: str, mark: float) -> None:
    endpoint.says = [answer]
    assert judged(endpoint, scale=1.0) == mark


def test_an_answer_without_a_number_is_no_mark(endpoint: Endpoint) -> None:
    endpoint.says = ["excellent"]
    with pytest.raises(ValueError, match="'excellent'"):
        judged(endpoint)


def test_a_judge_reads_messages_without_the_students_template(endpoint: Endpoint) -> None:
    """Which would begin turns of its own conversation."""
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}
    for messages, shown in (((user,), "2 + 2?"), ((system, user), "system: Be brief.\n\nuser: 2 + 2?")):
        endpoint.says = ["3"]
        judged(endpoint, replace(COMPLETION, prompt="<|im_start|>...", messages=messages), prompt="{prompt}|{response}")
        assert endpoint.requests[-1]["messages"][0]["content"] == f"{shown}|{COMPLETION.response}"


@pytest.mark.parametrize("answer", ["<think>\nFrom 0 to 10, 3 at least.\n</think>\n\n8", "0 to 10?</think>8"])
def test_what_a_judge_thinks_is_no_mark(endpoint: Endpoint, answer: str) -> None:
    endpoint.says = [answer]
    assert judged(endpoint) == pytest.approx(0.8)
    endpoint.says = ["<think>\nFrom 0 to 10, 3"]
    with pytest.raises(ValueError, match="From 0"):
        judged(endpoint)


def test_a_reasoning_judge_gets_the_parameters_that_it_takes(endpoint: Endpoint) -> None:
    """Each refusal costs one request, whatever comes after it."""
    endpoint.refuses, endpoint.says = ("max_tokens", "temperature"), ["7", "8"]
    judge = Judge(Judge.Config(url=endpoint.url, model="m", max_tokens=500))

    async def score_two() -> list[float]:
        return [await judge(COMPLETION) for _ in range(2)]

    assert asyncio.run(score_two()) == pytest.approx([0.7, 0.8])
    assert len(endpoint.requests) == 4
    assert endpoint.requests[-1].keys() == {"model", "messages", "max_completion_tokens", "key"}
    assert endpoint.requests[-1]["max_completion_tokens"] == 500


def test_a_refusal_that_names_no_parameter_of_ours_is_an_error(endpoint: Endpoint) -> None:
    """FastAPI's names are lists."""
    endpoint.refuses, endpoint.names = ("max_tokens",), ["body", "max_tokens"]
    with pytest.raises(QuestionRefused, match="BadRequestError"):
        judged(endpoint)


def test_what_a_judge_refuses_and_must_be_sent_is_an_error(endpoint: Endpoint) -> None:
    endpoint.refuses = ("model",)
    with pytest.raises(QuestionRefused, match="BadRequestError"):
        judged(endpoint)
    assert len(endpoint.requests) == 1
