"""``python -m gkd.doctor``: does a machine, or a cluster, have what this project needs?"""
