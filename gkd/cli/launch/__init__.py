"""Starting Ray nodes and submitting runs to them; used by the programs in launch/."""
