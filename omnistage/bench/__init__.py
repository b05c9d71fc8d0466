"""`omnistage bench serve`: load on a running service from a separate process, and what its clients see.

`workload` has the requests and when they are sent, `client` sends one, `load` sends them all, `measure` computes the
figures, `report`, `tables` and `plot` present them, `child` starts a service to be measured; none of these imports
torch. `offline` is `omnistage bench`: the engine beside the reference library.
"""
