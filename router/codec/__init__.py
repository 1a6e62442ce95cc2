"""Converts between protobuf messages and the types of shard, and errors to gRPC statuses."""
