"""Code that benchmarks, chaos runs and tests share. No installed package imports it.

processes, routers, balancers, postgres    start and end the parts of a cluster; cluster_file: the file that names them
proxy, hostile_peer, malformed             stand between two parts, or behave as no client should
edge, prometheus, dashboards, certificates provide what operators add: Envoy, Prometheus, dashboards, TLS certificates
clients, history                           run client processes, and record what each of them saw
tables, journal                            read what the databases say
checker                                    checks whether history, tables and journal show that the invariants held
arguments, table, environment, memory      are small helpers for command lines and reports
background                                 runs work while the code of a scope runs
"""
