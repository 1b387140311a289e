"""``launch/ray_cluster.sh head|worker|stop``: a Ray node on this machine, for runs that share a cluster.

    ./launch/ray_cluster.sh head                                 # on one machine; prints the two commands below
    ./launch/ray_cluster.sh worker --address HOST:6379           # on the others
    ./launch/ray_cluster.sh wait --address HOST:6379 --nodes N   # until N have joined, for scripts
    ./launch/ray_cluster.sh stop                                 # ends the nodes it started here, and no other Ray

With --simulate-gpus N Ray hands out N GPUs that are not there. What follows `--` goes to `ray start` as it is.
Exit codes: 0 done, 1 the node did not start or end, 2 what was requested cannot be.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.errors import ConfigError, Parser, RunFailed, entry_point, read_number

if TYPE_CHECKING:
    from gkd.cluster.session import local

START_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 10.0
PORT, DASHBOARD_PORT = 6379, 8265
RECONNECT_S = 900
"""How long a node and the runs on it live without Ray's control service. Runs use it to save their state; where their
drivers are gone as well, this is also how long their workers still hold their GPUs."""
# Python's path has the working directory, which is another one, where this project is not installed.
HOLD = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from gkd.cli.launch.hold import main; sys.exit(main(sys.argv[1:]))"
)
STARTED = "Ray runtime started."  # what `ray start` prints last


@entry_point
def main(arguments: list[str]) -> int:
    """Run the program; returns its exit code."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:split])
    from gkd.cluster.session import local

    if options.command == "stop":
        return local.stop_all()
    if options.command == "wait":
        _wait_for_nodes(options.address, options.nodes, options.timeout)
        return 0
    return _start(options, arguments[split + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "./launch/ray_cluster.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    port, count = read_number("a port from 1 to 65535", 1, 65535), read_number("a number from 1", 1)
    commands = parser.add_subparsers(dest="command", required=True, metavar="head|worker|wait|stop")
    head, worker = commands.add_parser("head"), commands.add_parser("worker")
    commands.add_parser("stop")
    wait = commands.add_parser("wait")
    for command in (head, worker):
        command.add_argument(
            "--simulate-gpus", type=count, metavar="N", help="let Ray hand out N GPUs that are not there"
        )
        command.add_argument("--num-cpus", type=count, metavar="N", help="CPUs Ray hands out; all of them unless given")
        command.add_argument("--node-ip-address", metavar="IP", help="this machine's address, if it has several")
        command.add_argument("--block", action="store_true", help="stay in the foreground until a signal ends the node")
    head.add_argument("--port", type=port, metavar="PORT", help=f"where nodes join ({PORT})")
    head.add_argument("--dashboard-port", type=port, metavar="PORT", help=f"for jobs ({DASHBOARD_PORT})")
    head.add_argument(
        "--dashboard-host", default="127.0.0.1", help="0.0.0.0 lets other machines submit (127.0.0.1: this one only)"
    )
    for command in (worker, wait):
        command.add_argument("--address", required=True, metavar="HOST:PORT", help="the head, as `head` printed it")
    worker.add_argument("--wait", type=float, default=0.0, metavar="S", help="seconds the head may take to answer (0)")
    wait.add_argument("--nodes", type=count, required=True, metavar="N", help="how many the cluster is to have")
    wait.add_argument("--timeout", type=float, default=START_TIMEOUT_S, metavar="S", help="seconds they have to come")
    return parser


def _start(options: argparse.Namespace, further: list[str]) -> int:
    from gkd.cluster.session import local
    from gkd.cluster.session.shutdown import exit_on_signals

    exit_on_signals()
    running = next((node for node in local.nodes() if _matches(node, options)), None)
    if running is not None:
        print(f"a {running.kind} of the cluster {running.address} runs here already (pid {running.pid})")
        if running.kind == "head":
            _show_next(running)
        return 0
    node = _new_node(options, further)
    print(f"the {node.kind} is up; log: {node.log}")
    if node.kind == "head":
        _show_next(node)
    print(end="", flush=True)
    return _wait_and_end(node) if options.block else 0


def _matches(node: local.LocalNode, options: argparse.Namespace) -> bool:
    """Return whether ``node`` is what the command is to start. Raises ConfigError when it stands in its way."""
    from gkd.cluster.session.port import listens

    if options.command == "worker":
        # A machine is one node, unless its GPUs are simulated.
        return options.simulate_gpus is None and _resolve(node.address) == _resolve(options.address)
    if node.kind != "head":
        return False
    if not listens(node.address, CONNECT_TIMEOUT_S):
        raise ConfigError(
            f"a head at {node.address} runs here without its control service: ./launch/ray_cluster.sh stop ends it"
        )
    runs = (("--port", _port_of(node.address), options.port),
            ("--dashboard-port", _port_of(node.dashboard or ""), options.dashboard_port),
            ("--simulate-gpus", node.simulated_gpus, options.simulate_gpus))  # fmt: skip
    for option, value, requested in runs:
        if requested is not None and requested != value:
            has = "without" if value is None else "with"
            raise ConfigError(
                f"a head at {node.address} runs here already, {has} {option}{'' if value is None else f' {value}'}: "
                "./launch/ray_cluster.sh stop ends it"
            )
    return True


def _resolve(address: str) -> tuple[str, str]:
    """Return the address that the host's name stands for, where that is known, and the port of ``host:port``."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        host = str(socket.getaddrinfo(host, None)[0][4][0])
    return host, port


def _new_node(options: argparse.Namespace, further: list[str]) -> local.LocalNode:
    """Start it and wait until it is up. Raises RunFailed when it does not come up."""
    from ray._common.network_utils import build_address
    from ray.util import get_node_ip_address

    from gkd.cluster.session import local
    from gkd.cluster.session.port import find_bind_error
    from gkd.cluster.session.shutdown import ignore_signals

    if not any(option.startswith("--object-store-memory") for option in further):
        local.require_limits()
    local.make_directory()
    ip = options.node_ip_address or get_node_ip_address()
    if options.command == "worker" and options.node_ip_address is None:
        # The address by which it reaches its head: a machine may have several networks, or no way out.
        towards_head = get_node_ip_address(options.address)
        ip = ip if ipaddress.ip_address(towards_head).is_loopback else towards_head
    if options.command == "head":
        options.port, options.dashboard_port = options.port or PORT, options.dashboard_port or DASHBOARD_PORT
        _require_free(options.port, "--port")
        _require_free(options.dashboard_port, "--dashboard-port")
        if obstacle := find_bind_error(options.dashboard_host, options.dashboard_port):
            text = f"--dashboard-host {options.dashboard_host}: the dashboard cannot listen there ({obstacle})"
            raise ConfigError(f"{text}; 0.0.0.0 stands for every address of this machine")
        address, dashboard = build_address(ip, options.port), _dashboard(options, ip)
    else:
        _wait_for_head(options.address, options.wait)
        address, dashboard = options.address, None
    local.clear()
    node = local.LocalNode(options.command, address, dashboard, 0, secrets.token_hex(4), options.simulate_gpus)
    command = [_python(node), "-c", HOLD, str(Path(__file__).parents[3]), f"--temp-dir={node.ray_directory}"]
    with node.log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *_ray_options(options, ip), *further],
            cwd=local.directory(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=_environment(options, node.mark),
            start_new_session=True,  # Ctrl-C ends whoever waits for it, not the node
        )
    node = replace(node, pid=process.pid)
    node.write()
    try:
        _wait_until_up(process, node)
    except BaseException:
        with ignore_signals():
            local.stop(node)
        raise
    return node


def _python(node: local.LocalNode) -> str:
    """Return this interpreter by a path that a shell takes as it is, which Ray makes it do for jobs' processes.

    They would never start below a directory with a space in its name.
    """
    if shlex.quote(sys.executable) == sys.executable or not Path(sys.executable).is_relative_to(sys.prefix):
        return sys.executable
    node.ray_directory.mkdir(exist_ok=True)
    (link := node.ray_directory / "python").symlink_to(sys.prefix)
    return str(link / Path(sys.executable).relative_to(sys.prefix))


def _wait_for_head(address: str, timeout_s: float) -> None:
    """Wait until the head at ``host:port`` answers. Raises ConfigError, as for one attempt, after ``timeout_s``."""
    from gkd.cluster.session.address import require_cluster

    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return require_cluster(address, "--address")
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _wait_for_nodes(address: str, n_nodes: int, timeout_s: float) -> None:
    """Wait until the cluster has ``n_nodes``. Raises RunFailed when it has fewer after ``timeout_s``."""
    import ray

    from gkd.cluster.session.connect import join

    deadline = time.monotonic() + timeout_s
    _wait_for_head(address, timeout_s)
    join(address, "--address")
    try:
        while (n_there := sum(bool(node["Alive"]) for node in ray.nodes())) < n_nodes:
            if time.monotonic() > deadline:
                raise RunFailed(f"{n_there} of {n_nodes} nodes joined {address} within {timeout_s:.0f} s")
            time.sleep(0.5)
    finally:
        ray.shutdown()


def _ray_options(options: argparse.Namespace, ip: str) -> list[str]:
    from gkd.cluster import gpu
    from gkd.cluster.session.control_service import SETTING
    from gkd.cluster.session.port import free_port

    arguments = [
        f"--node-ip-address={ip}",
        # Whatever is free: the defaults would clash with another Ray, or another node, on the same machine.
        "--dashboard-agent-listen-port=0",
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]
    if options.command == "head":
        arguments.append(f"--system-config={json.dumps({SETTING: RECONNECT_S})}")
        arguments += ["--head", f"--port={options.port}", f"--ray-client-server-port={free_port()}"]
        arguments += [f"--dashboard-host={options.dashboard_host}", f"--dashboard-port={options.dashboard_port}"]
    else:
        arguments.append(f"--address={options.address}")
    n_gpus, n_cpus, visible = options.simulate_gpus, options.num_cpus, os.environ.get(gpu.VISIBLE)
    if options.simulate_gpus is not None:
        n_cpus = n_cpus or max(os.cpu_count() or 1, options.simulate_gpus)  # each worker reserves one
    elif any(entry.startswith("MIG-") for entry in gpu.parse_visible_devices(visible) or []):
        n_gpus = len(gpu.usable_devices(visible, gpu.nvml_uuids()))  # Ray counts GPUs, however many slices they have
    if n_gpus is not None:
        arguments.append(f"--num-gpus={n_gpus}")
    if n_cpus is not None:
        arguments.append(f"--num-cpus={n_cpus}")
    return arguments


def _environment(options: argparse.Namespace, mark: str) -> dict[str, str]:
    """Return variables of the node and so of every worker and job on it."""
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled

    from gkd.cluster import gpu
    from gkd.cluster.session import address, local

    if "RAY_AUTH_MODE" not in os.environ:
        address.require_token()  # a cluster runs whatever it is sent, so not everybody's
    if options.command == "head" and os.environ["RAY_AUTH_MODE"].lower() == "token":
        address.create_token()
    ensure_token_if_auth_enabled(create_token_if_missing=False)
    dropped = {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", gpu.SIMULATED}
    if options.simulate_gpus is not None:  # Ray refuses more GPUs than the variable lists
        dropped.add(gpu.VISIBLE)
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    variables |= {
        **local.server_variables(RECONNECT_S),
        local.MARK: mark,
        "RAY_process_group_cleanup_enabled": "1",  # what a worker started ends with it
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    return variables if options.simulate_gpus is None else {**variables, gpu.SIMULATED: "1"}


def _wait_until_up(process: subprocess.Popen[bytes], node: local.LocalNode) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    log = node.log
    while STARTED not in log.read_text(errors="replace") or not _is_responding(node.dashboard):
        if process.poll() is not None:
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise RunFailed(f"`ray start` ended with code {process.returncode}: {lines[-1] if lines else 'no output'}")
        if time.monotonic() > deadline:
            raise RunFailed(f"the {node.kind} was not up within {START_TIMEOUT_S:.0f} s; its log is {log}")
        time.sleep(0.2)


def _is_responding(dashboard: str | None) -> bool:
    """Return whether the dashboard answers, if only by asking for the token; True where there is none to ask."""
    if dashboard is None:
        return True
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(f"{dashboard}/api/version", timeout=CONNECT_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    return True


def _show_next(node: local.LocalNode) -> None:
    print(f"join another machine:  ./launch/ray_cluster.sh worker --address {node.address}")
    print(f"submit a run:          gkd submit --address {node.dashboard} --follow +recipe=grpo")
    print("or run from here:      python -m gkd.main +recipe=grpo        (joins this cluster)")
    print("end what runs here:    ./launch/ray_cluster.sh stop")
    print(
        "Other machines need this one's ~/.ray/auth_token, readable to you alone, unless they share the home directory."
    )
    if node.dashboard is not None and "//127." in node.dashboard:
        print("Jobs are accepted from this machine only; head --dashboard-host 0.0.0.0 accepts them from others.")


def _wait_and_end(node: local.LocalNode) -> int:
    """Wait for a signal, or for the node to end by itself, and end all of it."""
    from gkd.cluster.session import local
    from gkd.cluster.session.shutdown import ignore_signals

    try:
        while node.is_alive:
            time.sleep(0.5)
        raise RunFailed(f"the {node.kind} ended by itself; its log is {node.log}")
    finally:
        with ignore_signals():
            local.stop(node)


def _dashboard(options: argparse.Namespace, ip: str) -> str:
    from ray._common.network_utils import build_address

    host = ip if options.dashboard_host in ("0.0.0.0", "::") else options.dashboard_host
    return f"http://{build_address(host, options.dashboard_port)}"


def _require_free(port: int, option: str) -> None:
    from gkd.cluster.session.port import is_free

    if not is_free(port):
        raise ConfigError(f"port {port} is taken by another program: choose another with {option}")


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2] or 0)


if __name__ == "__main__":
    sys.exit(main())
