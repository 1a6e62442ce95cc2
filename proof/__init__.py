"""Code that benchmarks, chaos runs and tests share. No installed package imports it.

processes, routers, balancers, postgres start and end the parts of a cluster; cluster_file: the file that names them
proxy, hostile_peer, malformed stand between two parts, or behave as no client should edge, prometheus, dashboards,
certificates what operators add: Envoy, Prometheus, Grafana's dashboards, TLS certificates clients, history client
processes, and what each of them saw tables, journal what the databases say checker whether history, tables and journal
show that the invariants held arguments, table, environment, memory small helpers of command lines and reports
background work that runs while the code of a scope runs
"""
