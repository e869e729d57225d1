"""The engines that tools/bench_peers.py measures: one file each, all behind `protocol.Engine`.

`registry` lists them; `process` runs them from outside; `report` and `plot` show what came out. An
engine's file runs in that engine's own Python, which need not have trnc or anything of its
dependencies: at the top it and `protocol` import the standard library only.
"""
