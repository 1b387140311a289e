"""The two ways a program of this project ends early, each told to the user in one line."""


class ConfigError(Exception):
    """What was asked cannot run: a setting, a file, a model, or more GPUs than there are. Exit code 2."""


class RunFailed(Exception):
    """Something died, timed out or was not what it had to be: says what, where and why. Exit code 1."""
