"""``python -m gkd`` is no program; it names those that are."""

import shlex
import sys

PROGRAMS = {
    "python -m gkd.main +recipe=on_policy_distill": "a run (--settings lists what can be set)",
    "python -m gkd.plan +recipe=grpo model.path=DIR": "what a layout needs, before it runs",
    "python -m gkd.doctor": "is this machine, or this cluster, ready?",
    "python -m gkd.monitor RUN_DIR": "how a run is doing, and its GPUs",
    "python -m gkd.export RUN_DIR [--step N] OUT": "a checkpoint as a Hugging Face model",
    "python -m gkd.teacher.serve teacher.model.path=DIR": "a teacher outside the cluster",
    "python launch/verify_gpus.py placement=8gpu": "which worker gets which GPU",
    "python launch/submit.py +recipe=grpo": "a run as a job of a cluster",
}


def _table() -> str:
    width = max(map(len, PROGRAMS))
    return "\n".join(f"  {command:{width}}  {what}" for command, what in PROGRAMS.items())


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(f"gkd itself is no program; from the project's directory:\n{_table()}\neach of them has --help")
        sys.exit(0)
    if sys.argv[1:]:
        print(f"error: gkd itself is no program: python -m gkd.main {shlex.join(sys.argv[1:])}", file=sys.stderr)
    else:
        print(f"error: gkd itself is no program; from the project's directory:\n{_table()}", file=sys.stderr)
    sys.exit(2)
