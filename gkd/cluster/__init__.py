"""GPUs and Ray: what a GPU is, pools of them, groups of workers, and the check of who got which.

Nothing is imported here, so that ``gkd.cluster.gpu`` and ``gkd.cluster.layout`` answer at once, without Ray.
"""
