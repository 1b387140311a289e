"""``python -m gkd`` is no program; it names those that are."""

import shlex
import sys

PROGRAMS = """\
  python -m gkd.main +recipe=on_policy_distill          a run (--settings lists what can be set)
  python -m gkd.doctor                                  is this machine, or this cluster, ready?
  python -m gkd.export RUN [--step N] OUT               a checkpoint as a Hugging Face model
  python -m gkd.teacher.serve teacher.model.path=DIR    a teacher outside the cluster"""

if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"error: gkd itself is no program: python -m gkd.main {shlex.join(sys.argv[1:])}", file=sys.stderr)
    else:
        print(f"error: gkd itself is no program; from the project's directory:\n{PROGRAMS}", file=sys.stderr)
    sys.exit(2)
