"""What a layout needs in memory and in time, worked out from shapes before anything is loaded.

Pure functions of a configuration, the shapes of its models and the hardware, which ``shapes`` and ``layout`` describe.
Nothing here imports torch, Ray or vLLM, so that a plan answers at once on a login node.
"""
