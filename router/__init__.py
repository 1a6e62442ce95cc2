"""gRPC in, shard calls out: services, placement, limits, errors. Knows gRPC and the shard package; knows no SQL."""
