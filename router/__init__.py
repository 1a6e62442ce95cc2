"""The front door: gRPC in, shard calls out."""
