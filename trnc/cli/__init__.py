"""The `trnc` command. Each command is a few lines; the work is in the rooms below.

Nothing here imports torch at module level, so that `trnc --help` and the API process stay light.
"""
