"""GPUs and Ray: which worker gets which GPUs, Ray's processes, workers and their groups, and which of them work.

Nothing is imported here, so that ``gkd.cluster.gpu`` and ``gkd.cluster.layout`` answer at once, without Ray.
"""
