"""Which engines and replicas work, which hang or died, and how these come back."""
