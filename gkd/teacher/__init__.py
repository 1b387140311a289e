"""``python -m gkd.teacher.serve``; what it does is in gkd.cli and gkd.scoring."""
