"""Takes gRPC calls and carries them out with the shard package. Knows gRPC and that package, but no SQL."""
