"""CURVE keys: needed everywhere, shared by both sides, told to nobody."""

from __future__ import annotations

import pickle
import re
import stat
from pathlib import Path

import numpy as np
import pytest
import zmq

from gkd.config import Teacher
from gkd.errors import ConfigError
from gkd.inference.requests import ScorerUnavailable
from gkd.scoring.address import Key, external_addresses, external_key, key_path
from tests.scoring.conftest import Connect, Serve, a_score
from tests.scoring.table import expected


def test_whoever_has_the_key_is_answered(serve: Serve, connect: Connect) -> None:
    key = Key.generate()
    client = connect(serve(key=key).server.address, key=pickle.loads(pickle.dumps(key)))
    client.connect(30)
    np.testing.assert_array_equal(client.submit(a_score()).result(30).ids, expected(a_score()).ids)


def test_an_open_port_with_a_key_serves_beyond_loopback(serve: Serve, connect: Connect) -> None:
    key = Key.generate()
    address = serve(host="0.0.0.0", key=key).server.address
    connect(address.replace("0.0.0.0", "127.0.0.1"), key=key).connect(30)


def test_without_the_key_nobody_is_answered(serve: Serve, connect: Connect) -> None:
    address = serve(key=Key.generate()).server.address
    with pytest.raises(ScorerUnavailable, match="another key"):
        connect(address).connect(0.5)


def test_knowing_the_servers_public_key_is_not_enough(serve: Serve) -> None:
    key, own = Key.generate(), Key.generate()
    address = serve(key=key).server.address
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for secret, public, answered in ((own.secret, own.public, False), (key.secret, key.public, True)):
        socket = context.socket(zmq.DEALER)
        socket.linger, socket.rcvtimeo = 0, 500
        socket.curve_secretkey, socket.curve_publickey, socket.curve_serverkey = secret, public, key.public
        socket.connect(address)
        socket.send(b"anything")
        if answered:
            assert socket.recv()
        else:
            with pytest.raises(zmq.Again):
                socket.recv()
    context.destroy(linger=0)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "teacher.example", "::"])
def test_an_address_others_can_reach_needs_a_key_file(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"{host} .*teacher\.key_file"):
        key_path(Teacher(), ["127.0.0.1", host])
    assert key_path(Teacher(key_file="a.key"), [host]) == Path("a.key")


def test_a_key_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ``~`` of ``teacher.key_file=~/teacher.key`` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    teacher = Teacher(key_file="~/teacher.key", server_ip="node")
    key = Key.load_or_create(key_path(teacher, ["node"]))
    assert Key.load(tmp_path / "teacher.key") == key == external_key(teacher)


def test_on_this_machine_a_user_has_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = key_path(Teacher(), ["127.0.0.1", "localhost", "::1"])
    with pytest.raises(ConfigError, match=r"teacher\.key_file"):
        Key.load(path)
    key = Key.load_or_create(path)
    assert path.is_relative_to(tmp_path) and stat.S_IMODE(path.stat().st_mode) == 0o600 and Key.load(path) == key


def test_a_key_file_is_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "teacher.key"
    key = Key.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Key.load_or_create(path) == key == Key.load(path)
    assert list(tmp_path.iterdir()) == [path]
    assert key.secret.decode() not in repr(key)


@pytest.mark.parametrize("content", [None, "", "nonsense", 'public-key = "a"\nsecret-key = "b"\n'])
def test_a_file_without_a_key_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "teacher.key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"key_file={path}"):
        Key.load(path)


def test_halves_of_different_pairs_are_no_key(tmp_path: Path) -> None:
    path = tmp_path / "teacher.key"
    one, other = Key.load_or_create(path), Key.generate()
    path.write_text(path.read_text().replace(one.secret.decode(), other.secret.decode()))
    with pytest.raises(ConfigError, match="no pair"):
        Key.load(path)


def test_hosts_of_an_external_teacher() -> None:
    teacher = Teacher(server_ip="10.0.0.1, node2:7000,::1", server_port=15000)
    assert external_addresses(teacher) == ["tcp://10.0.0.1:15000", "tcp://node2:7000", "tcp://[::1]:15000"]
    teacher = Teacher(server_ip="[::1]:7000, [fd00::2]", server_port=15000)
    assert external_addresses(teacher) == ["tcp://[::1]:7000", "tcp://[fd00::2]:15000"]
    for wrong in ("[::1]:x", "node:x", "a b", "node:", "http://node:8000", "tcp://node"):
        with pytest.raises(ConfigError, match=rf"^teacher\.server_ip={re.escape(wrong)}: "):
            external_addresses(Teacher(server_ip=wrong))
