"""``gkd data +recipe=grpo model.path=DIR data.train_files=[...]``: what the data of a run becomes, before it runs.

Takes what ``gkd train`` takes, and needs neither Ray nor a GPU. Prints the first prompts as the student and the teacher
see them, special tokens shown; the lengths of all prompts; how many are left out, and why; and the questions of
data.val_sets. Exit codes: 0 there is something to train on; 2 there is not, or the settings are wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gkd.errors import Parser, end_with_reader, entry_point, read_number  # imports nothing that may be missing

log = logging.getLogger("gkd")


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    parser = Parser("gkd data", description=__doc__)
    rows = read_number("a number of rows")
    parser.add_argument("--rows", type=rows, default=3, metavar="N", help="prompts of each file that are printed")
    parser.add_argument("overrides", nargs="*", help="as for gkd train")
    options = parser.parse_intermixed_args(arguments)
    from gkd.config.compose import compose_run
    from gkd.config.doubts import find_doubtful_line_ends
    from gkd.driver.inputs.preview import preview, show
    from gkd.observability.progress import console, log_to

    config, out = compose_run(options.overrides), console()
    log_to(out)
    for doubt in find_doubtful_line_ends(config):
        log.warning(doubt)
    sets = preview(config, out.print)
    with end_with_reader():
        show(sets, config, out, options.rows)
    if sets.error is not None:
        raise sets.error
    return 0
