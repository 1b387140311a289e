"""Who may connect to a server: ZeroMQ's authentication protocol (ZAP, rfc.zeromq.org/spec/27).

Not zmq.auth's ThreadAuthenticator: each server would have a further thread with an event loop, for which its start
waits up to ten seconds; and it lets in peers of other mechanisms, those without any key among them, unless addresses
are listed. Here the frontend's own thread answers, between messages.
"""

from __future__ import annotations

import hmac
from typing import Any

import zmq
from zmq.utils import z85

from gkd.scoring.address import Key


class Authenticator:
    """Lets in, to the CURVE servers of one context, only peers whose public key is that of ``key``.

    The thread that polls ``socket`` calls :meth:`answer`. It must exist before the server's socket is bound.
    """

    def __init__(self, context: Any, key: Key) -> None:
        self._public = z85.decode(key.public)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Decide on every peer that waits."""
        while True:
            try:
                version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            is_known = (
                mechanism == b"CURVE" and len(credentials) == 1 and hmac.compare_digest(credentials[0], self._public)
            )
            verdict = [b"200", b"OK", b"gkd"] if is_known else [b"400", b"unknown key", b""]
            self.socket.send_multipart([version, request, *verdict, b""], zmq.NOBLOCK)
