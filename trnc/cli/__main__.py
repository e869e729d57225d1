"""`python -m trnc.cli`."""

from trnc.cli.main import main

main()
