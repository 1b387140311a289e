"""Starting and reaching the groups of workers, and sending weights from one to the other."""
