"""What a layout needs in memory and in time, worked out from shapes before anything is loaded.

Pure functions of a configuration, the shapes of its models and the hardware: ``layout`` and ``shapes`` describe these,
``actor_memory`` and ``memory`` count bytes, ``pipeline`` and ``measured`` seconds; ``splits``, ``changes`` and
``advice`` try other settings, and ``report`` shows it all. Nothing here imports torch, Ray or vLLM, so that a plan
answers at once on a login node.
"""
