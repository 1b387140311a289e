"""The programs, one a file; :mod:`gkd.cli.command` is the ``gkd`` command in front of them."""
