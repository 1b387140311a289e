"""What tests build inside workers; imported there by name."""

import gc
import os
import subprocess
import sys
import threading

from gkd.errors import ConfigError, RunFailed


def spawn():
    return subprocess.Popen(["sleep", "600"]).pid


class Part:
    """A part of an engine."""

    def __init__(self, engine, span):
        self.placement = (engine, span, os.environ["CUDA_VISIBLE_DEVICES"])

    def what(self):
        return self.placement

    def spawn_child(self):
        return spawn()

    def serve(self):
        threading.Event().wait(60)


class Echo:
    """Answers, fails and dies on request."""

    def __init__(self, rank=0):
        self.rank = rank
        self.built_on = threading.get_ident()
        self.flag = threading.Event()

    def rank_times(self, factor):
        return self.rank * factor

    def same_thread(self):
        return threading.get_ident() == self.built_on

    def environment(self, name):
        return os.environ.get(name)

    def torch_loaded(self):
        return "torch" in sys.modules

    def heap(self):
        return gc.get_freeze_count(), len(gc.get_objects())

    def fail(self, rank, kind):
        if self.rank != rank:
            return self.wait_for_flag()
        raise {"value": ValueError, "config": ConfigError, "run": RunFailed}[kind]("two\nlines")

    def wait_for_flag(self):
        came = self.flag.wait(60)
        self.flag.clear()
        return came

    def set_flag(self):
        self.flag.set()

    def die(self):
        os._exit(3)

    def count(self, n):
        for i in range(n):
            if i == 2:
                self.wait_for_flag()
            yield i

    def spawn_child(self):
        return spawn()
