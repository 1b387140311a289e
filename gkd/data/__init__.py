"""From rows of files to prompts, and which of them are sampled for which step."""
