"""`omnistage bench serve`: load on a running service from a process of its own, and what its clients see.

`workload` says which requests are sent and when, `client` sends one, `load` sends them all, `measure` says what the
answers were worth, `report`, `tables` and `plot` show it, `child` starts a service to be measured. Nothing here
imports torch.
"""
