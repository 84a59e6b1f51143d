"""`python -m rar_lib` is `rar`."""

from rar_lib.cli import main

main()
