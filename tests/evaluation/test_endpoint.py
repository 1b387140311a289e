"""An endpoint as a model: a server that speaks the protocol, and one that does not answer."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gkd.cli.evaluate import compose_evaluation
from gkd.errors import ConfigError, RunFailed
from gkd.evaluation.answering import MOST_REFUSED
from gkd.evaluation.endpoint import _messages
from gkd.evaluation.questions import Question
from gkd.evaluation.run import evaluate
from gkd.evaluation.table import show
from gkd.types import Prompt
from tests.ray.cluster.conftest import eventually


class Adder(BaseHTTPRequestHandler):
    """Answers sums such as "2 + 3 =", and says that the limit cut those of more than two digits."""

    requests: list[dict[str, Any]]
    broken = False
    refuses: str | None = None
    lacks: str | None = None
    form = "{}"
    finish_reason = "stop"
    counts = True

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(request | {"path": self.path, "key": self.headers["Authorization"]})
        if self.broken or (self.refuses and self.refuses in request["messages"][-1]["content"]):
            self.send_error(400, "no")
            return
        if self.lacks in request:
            self._send(400, {"error": {"message": f"Unsupported parameter: {self.lacks}", "param": self.lacks}})
            return
        text = str(sum(int(word) for word in request["messages"][-1]["content"].split() if word.isdigit()))
        message = {"role": "assistant", "content": self.form.format(text)}
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "choices": [choice]}
        if self.counts:
            answer["usage"] = {"prompt_tokens": 1, "completion_tokens": len(text), "total_tokens": 1 + len(text)}
        self._send(200, answer)

    def _send(self, code: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setattr(Adder, "requests", [], raising=False)
    # Of connections that come together; the usual 5 are fewer than questions have samples, and there are no retries.
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 128)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Adder)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield httpd
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def arguments(tmp_path: Path, server: ThreadingHTTPServer, n: int = 3) -> list[str]:
    file = tmp_path / "sums.jsonl"
    rows = [{"question": f"{i} + {i} =", "answer": str(2 * i if i else 7)} for i in range(n)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    one = f"evaluate.sets.sums={{files:[{file}],prompt_key:question,answer_key:answer}}"
    endpoint = ["evaluate.endpoints.adder.model=m", f"evaluate.endpoints.adder.url={url}"]
    return [*endpoint, one, f"evaluate.output_dir={tmp_path}/out", "evaluate.endpoints.adder.retries=0"]


def test_an_endpoint_is_asked_what_is_missing(
    tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    out = Console(file=StringIO())
    (result,) = evaluate(compose_evaluation(arguments(tmp_path, server)), out, quick=False)
    assert result.scores["accuracy"].value == pytest.approx(2 / 3)
    assert result.scores["length"].value == 1.0
    assert {request["path"] for request in Adder.requests} == {"/v1/chat/completions"}
    assert {request["key"] for request in Adder.requests} == {"Bearer secret"}
    first = [{"role": "user", "content": "0 + 0 ="}]
    assert sum(request["messages"] == first for request in Adder.requests) == 1  # at the same time as the others
    (again,) = evaluate(compose_evaluation(arguments(tmp_path, server, n=5)), out, quick=False)
    assert len(Adder.requests) == 5  # and not 8
    assert (again.n, again.model, again.tokens_per_second is not None) == (5, "adder", True)
    warm = [*arguments(tmp_path, server, n=5), "evaluate.sets.sums.temperature=0.7"]
    evaluate(compose_evaluation(warm), out, quick=False)
    more = [*warm, "evaluate.sets.sums.samples=2"]
    (third,) = evaluate(compose_evaluation(more), out, quick=False)
    assert (third.samples, len(Adder.requests)) == (2, 15)  # the second answers alone
    (quick,) = evaluate(compose_evaluation(arguments(tmp_path, server, n=8)), out, quick=True)
    assert (quick.n, len(Adder.requests)) == (5, 15)  # five questions, all of which are answered
    own = arguments(tmp_path, server, n=2)
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('{"question": "1", "answer": null}\n')
    (last,) = evaluate(compose_evaluation(own), out, quick=False)
    assert (last.n, last.settings["n_unanswered"], len(Adder.requests)) == (2, 1, 15)


def test_an_evaluation_goes_on_with_the_code_that_it_began_with(
    tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "beside_evaluated.py").write_text("TEXT = 'before'\n")
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nfrom gkd.evaluation.strategies import Answer\n"
        "async def edits(generate, row):\n"
        "    Path(__file__).with_name('beside_evaluated.py').write_text('TEXT = 1')\n"
        "    from beside_evaluated import TEXT\n"
        "    return Answer(TEXT, 1)\n"
    )
    own = [*arguments(tmp_path, server, n=1), f"evaluate.strategies=[{tmp_path}/mine.py:edits]"]
    evaluate(compose_evaluation(own), Console(file=StringIO()))
    assert json.loads((tmp_path / "out" / "answers.jsonl").read_text())["text"] == "before"
    assert {file.name for file in (tmp_path / "out" / "sources").rglob("*.py")} >= {"mine.py", "beside_evaluated.py"}


def test_tokens_that_an_endpoint_does_not_count_are_not_known(
    tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adder, "counts", False)
    text = StringIO()
    out = Console(file=text, width=200)
    strategies = ["evaluate.strategies=[plain,self_consistency]"]
    results = evaluate(compose_evaluation([*arguments(tmp_path, server), *strategies]), out)
    for result in results:
        assert result.scores["accuracy"].value == pytest.approx(2 / 3)
        assert not {"length", "cost"} & result.scores.keys() and result.tokens_per_second is None
    show(results[:1], out)
    show(results, out)
    assert "nan" not in text.getvalue().lower()
    for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines():
        assert "NaN" not in line and json.loads(line)["n_tokens"] is None


def test_what_a_set_says_of_sampling_reaches_the_endpoint(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    settings = {"stop": "['.']", "top_k": "3", "min_p": "0.1", "presence_penalty": "0.5", "temperature": "0.7"}
    own = [f"evaluate.sets.sums.{name}={value}" for name, value in settings.items()]
    evaluate(compose_evaluation([*arguments(tmp_path, server), *own]), Console(file=StringIO()))
    sampling = {"stop": ["."], "top_k": 3, "min_p": 0.1, "presence_penalty": 0.5, "temperature": 0.7}
    assert {name: Adder.requests[0][name] for name in sampling} == sampling
    evaluate(compose_evaluation(arguments(tmp_path, server)), Console(file=StringIO()))  # other sampling, other answers
    assert len(Adder.requests) == 6 and not {"stop", "top_k", "min_p", "presence_penalty"} & Adder.requests[-1].keys()
    assert "seed" in Adder.requests[0] and "seed" not in Adder.requests[-1]  # which nothing is drawn by


def test_an_endpoints_chat_template_is_given_the_sets_variables(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    """As vLLM's server takes them; with others the answers are other ones."""
    for thinking in (False, True):
        own = f"evaluate.sets.sums.chat_template_kwargs={{enable_thinking: {thinking}}}"
        evaluate(compose_evaluation([*arguments(tmp_path, server), own]), Console(file=StringIO()))
        assert Adder.requests[-1]["chat_template_kwargs"] == {"enable_thinking": thinking}
    evaluate(compose_evaluation(arguments(tmp_path, server)), Console(file=StringIO()))
    assert len(Adder.requests) == 9 and "chat_template_kwargs" not in Adder.requests[-1]


def test_an_endpoint_is_shown_a_rows_tools_and_calls_none(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    """With other tools the answers are other ones."""
    settings = arguments(tmp_path, server)
    for n, name in enumerate(("look_up", "add", "add"), start=1):
        row = {"question": [{"role": "user", "content": "1 + 1 ="}], "answer": "2"}
        tools = [{"type": "function", "function": {"name": name}}]
        (tmp_path / "sums.jsonl").write_text(json.dumps(row | {"tools": tools}) + "\n")
        evaluate(compose_evaluation(settings), Console(file=StringIO()))
        assert len(Adder.requests) == min(n, 2)
        assert (Adder.requests[-1]["tools"], Adder.requests[-1]["tool_choice"]) == (tools, "none")


@pytest.mark.parametrize("parameter", ["max_tokens", "temperature"])
def test_an_endpoint_that_takes_a_limit_by_another_name_is_sent_that(
    tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, parameter: str
) -> None:
    """What was asked for is measured or refused: a temperature is not left out."""
    monkeypatch.setattr(Adder, "lacks", parameter)
    config, out = compose_evaluation(arguments(tmp_path, server)), Console(file=StringIO())
    if parameter == "temperature":
        with pytest.raises(RunFailed, match=r"evaluate\.endpoints\.adder.* temperature"):
            evaluate(config, out)
        return
    (result,) = evaluate(config, out)
    assert result.scores["accuracy"].value == pytest.approx(2 / 3)
    answered = [request for request in Adder.requests if "max_completion_tokens" in request]
    assert len(answered) == 3 and all("max_tokens" not in request for request in answered)


def test_a_closing_tag_that_an_endpoint_leaves_out_is_part_of_the_answer(
    tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adder, "form", "so <answer>{}")
    for stop, accuracy in (("['</answer>']", 2 / 3), ("['</x>']", 0.0)):
        own = f"evaluate.sets.sums.stop={stop}"
        (result,) = evaluate(compose_evaluation([*arguments(tmp_path, server), own]), Console(file=StringIO()))
        assert result.scores["accuracy"].value == pytest.approx(accuracy)
    monkeypatch.setattr(Adder, "finish_reason", "length")  # the limit ended it, and not the tag
    cut = [*arguments(tmp_path, server, n=4), "evaluate.sets.sums.stop=['</answer>']", "evaluate.sets.sums.limit=4"]
    evaluate(compose_evaluation(cut), Console(file=StringIO()))
    answers = map(json.loads, (tmp_path / "out" / "answers.jsonl").read_text().splitlines())
    assert [answer["text"] for answer in answers if answer["truncated"]] == ["so <answer>6"]


def test_a_code_block_that_an_endpoint_leaves_open_is_closed(
    tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adder, "form", "```py\n{}\n")
    evaluate(
        compose_evaluation([*arguments(tmp_path, server), "evaluate.sets.sums.stop=['```']"]), Console(file=StringIO())
    )
    lines = (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"].count("```") for line in lines] == [2] * 3


def test_an_endpoint_that_refuses_is_named(
    tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not asked all questions, where it refuses whatever it is asked first."""
    monkeypatch.setattr(Adder, "broken", True)
    own = [*arguments(tmp_path, server, n=40), "evaluate.endpoints.adder.concurrency=2"]
    with pytest.raises(RunFailed, match=r"evaluate\.endpoints\.adder: http://127.*: BadRequestError: "):
        evaluate(compose_evaluation(own), Console(file=StringIO()))
    assert MOST_REFUSED <= len(Adder.requests) <= MOST_REFUSED + 2


def test_a_question_that_is_refused_is_named_once_all_others_are_answered(
    tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a filter of contents: what was paid for is kept."""
    monkeypatch.setattr(Adder, "refuses", "0 + 0")
    own = [*arguments(tmp_path, server, n=20), "evaluate.endpoints.adder.concurrency=2"]
    with pytest.raises(RunFailed, match=r"evaluate\.endpoints\.adder: http.* question 1: BadRequestError: "):
        evaluate(compose_evaluation(own), Console(file=StringIO()))
    assert len(Adder.requests) == 20
    monkeypatch.setattr(Adder, "refuses", "2")  # some that were answered, and two others
    more = arguments(tmp_path, server, n=30)
    with pytest.raises(RunFailed, match=r"question 2[12]: .*and 1 more "):
        evaluate(compose_evaluation([*more, "evaluate.sets.sums.limit=22"]), Console(file=StringIO()))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", "<html>"),
        ("application/json", "{"),
        ("application/json", '{"detail": "no"}'),
        ("application/json", '{"choices": []}'),
        ("application/json", '{"choices": [{"message": null}]}'),
    ],
)
def test_an_endpoint_that_speaks_otherwise_is_named(
    kind: str, body: str, tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(own: Adder) -> None:
        own.rfile.read(int(own.headers["Content-Length"]))
        own.send_response(200)
        own.send_header("Content-Type", kind)
        own.send_header("Content-Length", str(len(body)))
        own.end_headers()
        own.wfile.write(body.encode())

    monkeypatch.setattr(Adder, "do_POST", reply)
    with pytest.raises(RunFailed, match=r"^evaluate\.endpoints\.adder: http://127.* answered with ") as failed:
        evaluate(compose_evaluation(arguments(tmp_path, server, n=1)), Console(file=StringIO()))
    assert "\n" not in str(failed.value)


def test_an_endpoint_that_sends_a_byte_now_and_then_is_given_up(
    tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what its URL has beside the place is sent, but not shown."""

    def drip(own: Adder) -> None:
        own.requests.append({"path": own.path})
        own.send_response(200)
        own.send_header("Content-Length", "100")
        own.end_headers()
        with suppress(OSError):
            for _ in range(100):
                own.wfile.write(b" ")
                time.sleep(0.1)

    monkeypatch.setattr(Adder, "do_POST", drip)
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    own = ["evaluate.endpoints.adder.timeout_s=0.5", f"evaluate.endpoints.adder.url='{url}?api-key=secret'"]
    with pytest.raises(RunFailed, match=r"^evaluate\.endpoints\.adder: http://\S*/v1 .*adder\.timeout_s\)"):
        evaluate(compose_evaluation([*arguments(tmp_path, server, n=1), *own]), Console(file=StringIO()))
    expected = ["/v1/chat/completions?api-key=secret"]
    assert eventually(lambda: [request["path"] for request in Adder.requests] == expected)


@pytest.mark.parametrize("proxy", ["socks5://me:secret-word@127.0.0.1:1", "nothing://me:secret-word@127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_said(
    proxy: str, tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package for SOCKS, which is not among what is installed, is named."""
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(RunFailed, match=r"^evaluate\.endpoints\.adder: http://127.* (SOCKS|scheme)(?!.*secret-word)"):
        evaluate(compose_evaluation(arguments(tmp_path, server, n=1)), Console(file=StringIO()))


def test_an_endpoint_needs_a_url_and_a_name_of_its_own(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    overrides = arguments(tmp_path, server)
    with pytest.raises(ConfigError, match=r"evaluate\.endpoints\.adder: url"):
        compose_evaluation(overrides[1:])
    for url in ("ftp://x", "http://", "http://[::1", "http://127.0.0.1:99999/v1", "http://a:b/v1"):
        with pytest.raises(ConfigError, match=r"evaluate\.endpoints\.adder: url"):
            compose_evaluation([*overrides, f"evaluate.endpoints.adder.url='{url}'"])
    with pytest.raises(ConfigError, match=r"evaluate\.endpoints\.adder: api_key_env(?!.*sk-1234)"):
        compose_evaluation([*overrides, "evaluate.endpoints.adder.api_key_env=sk-1234"])
    with pytest.raises(ConfigError, match=r"models\.adder and evaluate\.endpoints\.adder"):
        compose_evaluation([*overrides, "models.adder=DIR"])


def test_a_text_of_a_strategy_takes_the_place_of_the_last_message_alone() -> None:
    shown = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1 ="})
    question = Question("0" * 16, Prompt(0, np.array([1], np.int32), "Add. 1 + 1 =", messages=shown), {})
    assert _messages(question, "2 + 2 =") == [shown[0], {"role": "user", "content": "2 + 2 ="}]
    assert _messages(question, None) == list(shown)
