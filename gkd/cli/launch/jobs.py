"""A cluster's jobs, through Ray's own client: every request has a deadline, every failure is one line."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import ray
import requests
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from gkd.cluster.session.address import require_same_ray, use_token
from gkd.errors import ConfigError, RunFailed, one_line

CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
LOST_TIMEOUT_S = 60.0  # a cluster that stays silent longer is gone
STOP_TIMEOUT_S = 600.0  # for a job's last checkpoint; Ray's own limit is 3 s
POLL_EVERY_S = 5.0
NO_PROXY = {"http": None, "https": None, "all": None}  # as a job's log and nodes that join are fetched without one

Write = Callable[[str], None]


class _Client(JobSubmissionClient):  # type: ignore[misc]
    """Ray's client with deadlines, which its own requests lack, and without the environment's proxies."""

    timeout_s = CONNECT_TIMEOUT_S

    def _do_request(self, *args: Any, **kwargs: Any) -> requests.Response:
        options = {"timeout": self.timeout_s, "proxies": NO_PROXY, **kwargs}
        response: requests.Response = super()._do_request(*args, **options)
        return response


class Jobs:
    """The jobs of the cluster whose dashboard is at ``address``, such as ``http://10.0.0.1:8265``."""

    def __init__(self, address: str) -> None:
        """Connect. Raises ConfigError when no dashboard of a Ray of this version answers there in time."""
        self.address = address.rstrip("/") if "://" in address else f"http://{address}"
        if not self.address.startswith(("http://", "https://")):
            raise ConfigError(f"--address {address}: expected the head's dashboard, such as http://10.0.0.1:8265")
        use_token()
        for module in ("dashboard_sdk", "job.sdk"):
            logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.ERROR)
        os.environ["RAY_API_SERVER_ADDRESS"] = self.address  # Ray lets the variable outweigh the argument
        try:
            self._client = _Client(self.address)
            ray_version = self._client._server_ray_version
        except requests.exceptions.Timeout:
            raise ConfigError(f"--address {address}: no answer within {CONNECT_TIMEOUT_S:.0f} s") from None
        except (ConnectionError, requests.exceptions.ConnectionError, requests.exceptions.InvalidURL):
            raise ConfigError(
                f"--address {address}: nothing answers there; ./launch/ray_cluster.sh head starts a cluster and prints "
                "its address"
            ) from None
        except ray.exceptions.AuthenticationError:
            raise ConfigError(
                f"--address {address}: this cluster requires a token: copy ~/.ray/auth_token from its head's machine"
            ) from None
        except (requests.exceptions.RequestException, RuntimeError, KeyError, ValueError):
            raise ConfigError(f"--address {address}: what answers there is not a Ray dashboard") from None
        require_same_ray({"ray_version": ray_version}, f"--address {address}")
        self._client.timeout_s = REQUEST_TIMEOUT_S

    def submit(self, name: str, command: str, package: Path, output: Path) -> None:
        """Start ``command`` as job ``name`` in a copy of ``package``. Raises RunFailed when the cluster refuses."""
        try:
            self._client.submit_job(
                entrypoint=command,
                submission_id=name,
                runtime_env={
                    "working_dir": str(package),
                    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": f"{STOP_TIMEOUT_S:.0f}"},
                },
                metadata={"output_dir": str(output)},
            )
        except (RuntimeError, ValueError, requests.exceptions.RequestException) as error:
            raise RunFailed(f"the cluster at {self.address} did not take the job: {one_line(error)}") from error

    def info(self, name: str) -> JobDetails:
        """Return what is known of a job. Raises ConfigError without it, RunFailed for a silent cluster."""
        deadline = time.monotonic() + LOST_TIMEOUT_S
        while True:
            try:
                return self._client.get_job_info(name)
            except RuntimeError as error:
                if "404" in str(error):
                    raise ConfigError(f"there is no job {name} on {self.address}{self._list_names()}") from None
                reason = one_line(error)
            except (requests.exceptions.RequestException, ConnectionError) as error:
                reason = type(error).__name__
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"the cluster at {self.address} has not answered for {LOST_TIMEOUT_S:.0f} s ({reason}); job {name} "
                    "may still run"
                )
            time.sleep(1.0)

    def list(self) -> list[JobDetails]:
        """Return every job that was submitted, the latest last."""
        try:
            jobs: list[JobDetails] = self._client.list_jobs()
        except (RuntimeError, requests.exceptions.RequestException) as error:
            raise RunFailed(f"the cluster at {self.address} does not list its jobs: {one_line(error)}") from error
        return sorted((job for job in jobs if job.submission_id), key=lambda job: job.start_time or 0)

    def stop(self, name: str) -> JobDetails:
        """Have a job that runs end, and wait until it has."""
        try:
            self._client.stop_job(name)
        except (RuntimeError, requests.exceptions.RequestException) as error:
            raise RunFailed(f"the cluster at {self.address} did not stop job {name}: {one_line(error)}") from error
        limit = STOP_TIMEOUT_S + 30  # by then it was killed
        deadline = time.monotonic() + limit
        while not (details := self.info(name)).status.is_terminal():
            if time.monotonic() > deadline:
                raise RunFailed(f"job {name} has not ended within {limit:.0f} s of being stopped")
            time.sleep(0.2)
        return details

    def follow(self, name: str, write: Write) -> JobDetails:
        """Pass a job's log on until the job has ended, also over a broken connection."""
        return asyncio.run(self._follow(name, write))

    async def _follow(self, name: str, write: Write) -> JobDetails:
        n_read = 0  # characters passed on; a new connection begins at the log's start
        while True:
            at = 0
            async for text in self._tail(name):
                at += len(text)
                if at > n_read:
                    write(text[len(text) - (at - n_read) :])
                    n_read = at
            details = self.info(name)
            if details.status.is_terminal():
                return details
            await asyncio.sleep(1.0)

    async def _tail(self, name: str) -> AsyncIterator[str]:
        """Yield pieces of the log until the connection ends, or the job has ended and nothing more comes."""
        stream = self._client.tail_job_logs(name)
        ended = False
        while True:
            piece = asyncio.ensure_future(anext(stream, None))
            while not (await asyncio.wait({piece}, timeout=POLL_EVERY_S))[0]:
                if ended:
                    piece.cancel()
                    return
                ended = self.info(name).status.is_terminal()
            try:
                text = piece.result()
            except (RuntimeError, aiohttp.ClientError):  # the connection broke
                return
            if text is None:
                return
            yield text

    def _list_names(self) -> str:
        names = [str(job.submission_id) for job in self.list()]
        return f"; there are {', '.join(names[-5:])}" if names else "; it has none"


def exit_code(job: JobDetails) -> int:
    """Return the code of the job's own process; 143 for one that was stopped, 1 where there was no process to end."""
    if job.status == JobStatus.SUCCEEDED:
        return 0
    if job.status == JobStatus.STOPPED:
        return 143
    code: int | None = job.driver_exit_code
    if code is None:
        return 1
    return code if code >= 0 else 128 - code
