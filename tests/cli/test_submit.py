"""What goes with a job, what its paths mean, and addresses that are none."""

from __future__ import annotations

import http.server
import io
import os
import re
import shlex
import shutil
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

from gkd.cli.launch import jobs as jobs_module
from gkd.cli.launch import package as package_module
from gkd.cli.launch.package import pack
from gkd.cli.launch.paths import resolve_paths
from gkd.cli.submit import _follow, main
from gkd.config.compose import compose, compose_run
from gkd.config.data import TASKS
from gkd.errors import ConfigError
from tests.e2e.on_a_cluster.conftest import free_port
from tests.observability.runs import make_run


def packed(directory: Path, target: Path) -> set[str]:
    pack(directory, target)
    return set(zipfile.ZipFile(target).namelist())


def test_a_checkout_goes_without_environment_outputs_and_data(tmp_path: Path) -> None:
    here = tmp_path / "checkout"
    kept = ["gkd/__init__.py", "gkd/data/prompts.py", "conf/config.yaml", "mine/outputs/reward.py"]
    left = [".venv/lib/x.py", ".git/config", "outputs/a/metrics.jsonl", "data/train.jsonl", "env/pyvenv.cfg"]
    left += ["env/lib/x.py", "gkd/__pycache__/x.pyc", "gkd/.secret", ".netrc"]
    for name in kept + left:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("x")
    (here / "linked").symlink_to(tmp_path)
    n_files, without = pack(here, tmp_path / "a.zip")
    assert n_files == len(kept)
    assert without == ["data", "env", "linked", "outputs"]
    assert set(zipfile.ZipFile(tmp_path / "a.zip").namelist()) == set(kept)


def test_a_name_that_no_zip_file_can_have_is_told(tmp_path: Path) -> None:
    (tmp_path / "gkd").mkdir()
    (tmp_path / "gkd" / "__init__.py").write_text("")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.py")).write_text("x")
    with pytest.raises(ConfigError, match=r"'bad\\udcff\.py'"):
        pack(tmp_path, tmp_path / "a.zip")


def test_this_gkd_goes_along_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text("x")
    names = packed(tmp_path / "here", tmp_path / "a.zip")
    assert {"mine.py", "gkd/main.py", "gkd/data/prompts.py", "conf/recipe/grpo.yaml"} <= names
    tasks = {entry.partition(":")[0].removeprefix("gkd.").replace(".", "/") + ".py" for entry in TASKS.entries.values()}
    assert tasks and tasks <= names


def test_a_directory_that_is_too_large_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_module, "MAX_MB", 1)
    (tmp_path / "gkd").mkdir()
    (tmp_path / "gkd" / "__init__.py").write_text("")
    (tmp_path / "checkpoint.bin").write_bytes(os.urandom(2_000_000))
    with pytest.raises(ConfigError, match=r"1 MB .*checkpoint\.bin \(2 MB\)"):
        pack(tmp_path, tmp_path / "a.zip")


def test_relative_paths_mean_this_directory(tmp_path: Path) -> None:
    odd = tmp_path / "it's, a [place] ${here}"
    (odd / "student").mkdir(parents=True)
    (odd / "train.jsonl").write_text("")
    overrides = ["+recipe=on_policy_distill", "model.path=student", "teacher.model.path=Org/Name-7B"]
    overrides += ["data.train_files=[train.jsonl,/all/see/this.jsonl]", "data.val_files=train.jsonl"]
    overrides += ["data.cache_dir=made/later", "teacher.key_file=key", "teacher.chat_template=chat.jinja"]
    config = compose(overrides)
    # What the job composes from both, as Hydra reads it.
    job = compose_run([*overrides, *resolve_paths(config, odd, odd / "out")])
    assert job.model.path == str(odd / "student")
    assert job.teacher.model.path == "Org/Name-7B"  # a name in the cluster's cache of models
    assert job.data.train_files == [str(odd / "train.jsonl"), "/all/see/this.jsonl"]
    assert job.data.val_files == [str(odd / "train.jsonl")]
    assert job.data.cache_dir == str(odd / "made" / "later")
    assert job.teacher.key_file == str(odd / "key")
    assert job.teacher.chat_template == str(odd / "chat.jinja")
    kept = [*overrides, "teacher.chat_template=own"]
    assert compose([*kept, *resolve_paths(compose(kept), odd, odd / "out")]).teacher.chat_template == "own"
    assert job.trainer.output_dir == str(odd / "out")


def test_a_rewards_file_goes_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is packed is named from the job's directory, whose place differs from node to node."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere.py"
    (here / "mine").mkdir(parents=True)
    (here / "data").mkdir()
    for file in (here / "mine" / "own.py", here / "data" / "own.py", elsewhere):
        file.write_text("def f(completion):\n    return 1\n")
    monkeypatch.chdir(here)
    names = ["accuracy", "mine/own.py:f", f"{here}/data/own.py:f", f"{elsewhere}:f"]
    overrides = ["+recipe=grpo", f"reward.functions=[{','.join(names)}]"]
    settled = resolve_paths(compose(overrides), here, here / "out")
    assert f"reward.functions=['accuracy','mine/own.py:f','{here}/data/own.py:f','{elsewhere}:f']" in settled
    job = tmp_path / "_ray_pkg_1"
    shutil.copytree(here / "mine", job / "mine")
    monkeypatch.chdir(job)
    assert compose([*overrides, *settled]).reward.functions[1] == f"{job}/mine/own.py:f"
    with pytest.raises(ConfigError, match=r"reward\.functions: .*none\.py"):
        compose(["+recipe=grpo", "reward.functions=[none.py:f]"])


def test_trackers_and_tasks_of_the_users_go_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("class T:\n    log = close = make = model_configs = None\n")
    monkeypatch.chdir(tmp_path)
    overrides = ["+recipe=grpo", "trainer.trackers=[tensorboard,own.py:T]", "data.task=own.py:T"]
    settled = resolve_paths(compose(overrides), tmp_path, tmp_path / "out")
    assert {"trainer.trackers=['tensorboard','own.py:T']", "data.task='own.py:T'"} <= set(settled)


def test_a_loss_and_an_advantage_go_with_the_job_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file, of in (("divergence.py", "losses.forward_kl:ForwardKL"), ("own.py", "algorithms.group_mean:GroupMean")):
        module, _, name = of.partition(":")
        (tmp_path / file).write_text(f"from gkd.{module} import {name}\nclass Mine({name}):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    overrides = ["algorithm.loss.name=divergence.py:Mine", "algorithm.reward_weight=1", "rollout.n=2"]
    overrides += [f"algorithm.advantage.name={tmp_path}/own.py:Mine", "algorithm.advantage.divide_by_std=false"]
    settled = resolve_paths(compose([*overrides, "reward.functions=[accuracy]"]), tmp_path, tmp_path / "out")
    assert {"algorithm.loss.name='divergence.py:Mine'", "algorithm.advantage.name='own.py:Mine'"} <= set(settled)


def test_several_teachers_and_data_sets_are_named_as_in_a_run(tmp_path: Path) -> None:
    for directory in ("first", "saved"):
        (tmp_path / directory).mkdir()
    overrides = ["+recipe=on_policy_distill", "model.path=/m", "teacher.models={v1.5:first,b:Org/Name-7B}"]
    overrides += [
        "data.teacher_key=t",
        "placement=8gpu",
        "data.train_files=['saved:train',Org/Questions,sav*/]",
        "data.val_files='Org/Set:test'",
    ]
    job = compose([*overrides, *resolve_paths(compose(overrides), tmp_path, tmp_path / "out")])
    assert job.teacher.models == {"v1.5": str(tmp_path / "first"), "b": "Org/Name-7B"}
    assert job.data.train_files == [f"{tmp_path}/saved:train", "Org/Questions", f"{tmp_path}/sav*"]
    assert job.data.val_files == ["Org/Set:test"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["model.path=/m", "data.train_files=[no.jsonl]", "data.val_files=[/v]"],
            "data.train_files=no.jsonl: ",
        ),
        (
            ["model.path=./m", "data.train_files=[/t]", "data.val_files=[/v]"],
            "model.path=./m: ",
        ),
        (["cluster.address=10.0.0.1:6379"], "the cluster"),
        (["placement=cpu"], "placement=cpu"),
    ],
)
def test_what_a_job_cannot_have_is_refused(overrides: list[str], expected: str, tmp_path: Path) -> None:
    config = compose(["+recipe=grpo", *overrides, *(["data.answer_key=a"] if "model" in overrides[0] else [])])
    with pytest.raises(ConfigError) as caught:
        resolve_paths(config, tmp_path, tmp_path / "out")
    assert expected in str(caught.value)


class _Page(http.server.BaseHTTPRequestHandler):
    """A web server that is no Ray."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>welcome</html>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")  # outweighs an argument in Ray's own client


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", "nothing"),
        ("web", "Ray dashboard"),
        ("silent", "1 s"),
        ("ray", "expected"),
    ],
)
def test_an_address_that_is_none_is_one_line_in_time(
    kind: str,
    expected: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if kind == "silent":
        monkeypatch.setattr(jobs_module, "CONNECT_TIMEOUT_S", 1.0)
        monkeypatch.setattr(jobs_module._Client, "timeout_s", 1.0)
    other = {"none": f"http://127.0.0.1:{free_port()}", "ray": "ray://127.0.0.1:10001"}
    address = other[kind] if kind in other else request.getfixturevalue(kind)
    assert main(["--address", address, "--status"]) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: --address {address}: ")
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_a_dashboard_is_not_asked_for_through_a_proxy(
    variable: str, web: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """That of this machine's own head could not be reached otherwise where a company's proxy is set."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    assert main(["--address", web, "--status"]) == 2
    assert "Ray dashboard" in capfd.readouterr().err  # the page's answer, and not that nothing answers


def test_without_an_address_the_head_started_here_is_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS")
    monkeypatch.setenv("GKD_RAY_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="no --address"):
        from gkd.cli.submit import _address

        _address(None)


@pytest.mark.parametrize("option", ["--stop", "--attach"])
def test_a_job_without_a_name_is_refused(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", "http://127.0.0.1:9", option, ""]) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: {option} ") and err.count("\n") == 1


class PlayedJobs:
    """A cluster that does each job as it is followed: one that leaves a run behind, and one that fails."""

    address = "http://cluster"

    def __init__(self, address: str) -> None:
        self.submitted: dict[str, tuple[str, Path]] = {}
        PLAYED.append(self)

    def submit(self, name: str, command: str, package: Path, output: Path) -> None:
        assert zipfile.is_zipfile(package)
        self.package = package.read_bytes()
        self.submitted[name] = command, output

    def follow(self, name: str, write: Callable[[str], None]) -> Any:
        fails = len([*self.submitted]) == [*self.submitted].index(name) + 1
        if not fails:
            self.submitted[name][1].parent.mkdir(parents=True, exist_ok=True)
            make_run(self.submitted[name][1])
        status = JobStatus.FAILED if fails else JobStatus.SUCCEEDED
        return SimpleNamespace(status=status, driver_exit_code=int(fails))


PLAYED: list[PlayedJobs] = []


def test_a_sweep_is_a_job_for_each_run_and_a_table_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs_module, "Jobs", PlayedJobs)
    monkeypatch.chdir(tmp_path)
    overrides = ["+recipe=grpo", "actor.lr=1e-5,1e-4", "trainer.seed=3", "trainer.output_dir=sweep"]
    assert main(["--address", "http://cluster", "--multirun", "--follow", *overrides]) == 1  # one of them failed
    jobs = [*PLAYED[-1].submitted.values()]
    assert [output for _, output in jobs] == [tmp_path / "sweep" / f"actor.lr={lr}" for lr in ("1e-05", "0.0001")]
    for lr, (command, output) in zip((1e-5, 1e-4), jobs, strict=True):
        config = compose(shlex.split(command.partition(" -m gkd.main ")[2]))
        assert (config.actor.lr, config.trainer.seed, config.trainer.output_dir) == (lr, 3, str(output))
        assert (config.trainer.run_group, config.cluster.reserve_timeout_s) == ("sweep", 86_400)
    out = capsys.readouterr().out
    assert re.search(r"actor.lr=1e-05 +0\.4500", out) and "actor.lr=0.0001" in out and "failed, exit code 1" in out
    assert (tmp_path / "sweep" / "report.html").exists()
    assert main(["--address", "http://cluster", "-m", "--status"]) == 2
    assert "--multirun" in capsys.readouterr().err


def test_what_follows_a_job_or_ends_it_is_printed_to_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In any directory: launch/submit.py is in a checkout only."""
    monkeypatch.setattr(jobs_module, "Jobs", PlayedJobs)
    monkeypatch.chdir(tmp_path)
    assert main(["--address", "http://cluster", "+recipe=grpo"]) == 0
    *_, attach, stop = capsys.readouterr().out.splitlines()
    (name,) = PLAYED[-1].submitted
    assert [shlex.split(line) for line in (attach, stop)] == [
        ["gkd", "submit", "--address", "http://cluster", option, name] for option in ("--attach", "--stop")
    ]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlayedJobs, "follow", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _follow(PLAYED[-1], name)  # type: ignore[arg-type]
    assert stop in capsys.readouterr().out


def test_recipes_of_one_sweep_write_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs_module, "Jobs", PlayedJobs)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.yaml").write_text("cluster: {reserve_timeout_s: 60}\n")
    overrides = ["+recipe=gspo,grpo,distill_and_reward", "own.yaml"]
    assert main(["--address", "http://cluster", "--multirun", "--follow", *overrides]) == 1  # the last one failed
    jobs = [*PLAYED[-1].submitted.values()]
    assert len({output.parent for _, output in jobs}) == 1
    assert len(re.findall(r"recipe=\w+ +0\.4500", capsys.readouterr().out)) == 2
    assert "cluster.reserve_timeout_s" not in jobs[0][0]
    assert main(["--address", "http://cluster", "-m", "+recipe=grpo,gspo", "cluster.reserve_timeout_s=300"]) == 0
    assert all("86400" not in command for command, _ in PLAYED[-1].submitted.values())
    assert main(["--address", "http://cluster", "+recipe=grpo", "trainer.output_dir='~/mine'"]) == 0
    assert [output for _, output in PLAYED[-1].submitted.values()] == [tmp_path / "mine"]


@pytest.mark.parametrize("place", ["own.yaml", "outputs/a/config.yaml", "../elsewhere.yaml", "~/mine.yaml"])
def test_a_file_of_settings_goes_with_the_job(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    (here / "outputs" / "a").mkdir(parents=True)
    monkeypatch.setattr(jobs_module, "Jobs", PlayedJobs)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    (here / Path(place).expanduser()).write_text("recipe: grpo\ntrainer: {seed: 7, output_dir: ~/run}\n")
    assert main(["--address", "http://cluster", place, "actor.lr=0.5"]) == 0
    (command, output), *_ = PLAYED[-1].submitted.values()
    assert output == tmp_path / "run"
    job = tmp_path / "jobs" / "1"
    with zipfile.ZipFile(io.BytesIO(PLAYED[-1].package)) as archive:
        archive.extractall(job)
    monkeypatch.chdir(job)
    config = compose(shlex.split(command.partition(" -m gkd.main ")[2]))
    assert (config.recipe, config.trainer.seed, config.actor.lr) == ("grpo", 7, 0.5)


def test_a_bad_setting_is_refused_before_anything_is_asked(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", "http://127.0.0.1:1", "+recipe=grpo", "trainer.total_step=5"]) == 2
    assert "trainer.total_steps" in capfd.readouterr().err
