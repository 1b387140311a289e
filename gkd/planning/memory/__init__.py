"""Bytes on each GPU: of the actor, of engines and their caches, and of groups that share one."""
